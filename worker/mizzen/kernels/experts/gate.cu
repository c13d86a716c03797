// SPDX-License-Identifier: Apache-2.0
// Functions of gate and up; prepended to the kernels that use them. GATE says which.

#define SILU 0
#define GELU_TANH 1
#define CLAMPED_SWIGLU 2

__device__ __forceinline__ float apply_gate(float gate, float up, float limit, float slope) {
    float exponent = -gate;
    // 0.5 * (1 + tanh(z)) equals the sigmoid of 2 z.
    if (GATE == GELU_TANH) exponent = -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if (GATE == CLAMPED_SWIGLU) {
        // Comparisons keep NaN, unlike fminf.
        gate = gate > limit ? limit : gate;
        up = (up > limit ? limit : up < -limit ? -limit : up) + 1;
        exponent = -slope * gate;
    }
    return __fdividef(gate, 1 + __expf(exponent)) * up;
}
