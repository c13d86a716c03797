__device__ __forceinline__ float low(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float dot(unsigned a, unsigned b, float sum) {
    return fmaf(high(a), high(b), fmaf(low(a), low(b), sum));
}
__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ unsigned sum_of(unsigned a, unsigned b) {
    return packed(low(a) + low(b), high(a) + high(b));
}
__device__ __forceinline__ unsigned scaled(unsigned x, float by, unsigned scale) {
    return packed(low(x) * by * low(scale), high(x) * by * high(scale));
}
__device__ __forceinline__ float square(unsigned x) { return fmaf(high(x), high(x), low(x) * low(x)); }
// Volatile, and not through the read-only path: the compiler may move neither behind the wait.
__device__ __forceinline__ uint4 fixed_at(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ uint4 input_at(const uint4* at) {
    uint4 v;  // the wait has made it visible; the block's rows share it in the L1
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float over_warp(float sum) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

#define PER_THREAD ((VECTORS + 255) / 256)

// weight [rows * (1 + GATE), VECTORS * 8], x [VECTORS * 8] -> out [rows], all bfloat16, 16-byte aligned.
// With NORM, x (with ADD, x + before, which goes to `after`) is normalised and scaled first.
extern "C" __global__ void __launch_bounds__(256)
gemv(const uint4* weight, const uint4* x, unsigned short* out, int rows,
     const uint4* before, uint4* after, const uint4* scale, float epsilon) {
    __shared__ float partial[(1 + GATE) * 8];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * (8 / SHARE) + warp / SHARE;
    const int first = warp % SHARE * 32 + lane;
    uint4 w[1 + GATE][LOADS];
#pragma unroll
    for (int half = 0; half <= GATE; half++)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int index = first + i * SHARE * 32;
            w[half][i] = make_uint4(0, 0, 0, 0);
            if (row < rows && index < VECTORS)
                w[half][i] = fixed_at(weight + (size_t)(row + half * rows) * VECTORS + index);
        }
#if NORM
    __shared__ uint4 normed[VECTORS];
    __shared__ float squares[8];
    uint4 scales[PER_THREAD], h[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        scales[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) scales[i] = fixed_at(scale + index);
    }
#endif
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if NORM
    float total = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        h[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) {
            h[i] = input_at(x + index);
#if ADD
            const uint4 b = input_at(before + index);
            h[i].x = sum_of(h[i].x, b.x), h[i].y = sum_of(h[i].y, b.y);
            h[i].z = sum_of(h[i].z, b.z), h[i].w = sum_of(h[i].w, b.w);
            if (blockIdx.x == 0) after[index] = h[i];
#endif
        }
        total += square(h[i].x) + square(h[i].y) + square(h[i].z) + square(h[i].w);
    }
    total = over_warp(total);
    if (lane == 0) squares[warp] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) total += squares[i];
    const float by = rsqrtf(total / (VECTORS * 8) + epsilon);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        if (index < VECTORS)
            normed[index] = make_uint4(scaled(h[i].x, by, scales[i].x), scaled(h[i].y, by, scales[i].y),
                scaled(h[i].z, by, scales[i].z), scaled(h[i].w, by, scales[i].w));
    }
    __syncthreads();
#endif
    float sums[1 + GATE] = {};
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = first + i * SHARE * 32;
        if (index < VECTORS) {
#if NORM
            const uint4 v = normed[index];
#else
            const uint4 v = input_at(x + index);
#endif
#pragma unroll
            for (int half = 0; half <= GATE; half++) {
                float sum = dot(w[half][i].x, v.x, sums[half]);
                sum = dot(w[half][i].y, v.y, sum);
                sum = dot(w[half][i].z, v.z, sum);
                sums[half] = dot(w[half][i].w, v.w, sum);
            }
        }
    }
#pragma unroll
    for (int half = 0; half <= GATE; half++) sums[half] = over_warp(sums[half]);
    if (SHARE > 1) {
        if (lane == 0)
            for (int half = 0; half <= GATE; half++) partial[half * 8 + warp] = sums[half];
        __syncthreads();
        for (int half = 0; half <= GATE; half++) {
            sums[half] = 0;
            for (int i = 0; i < SHARE; i++) sums[half] += partial[half * 8 + warp / SHARE * SHARE + i];
        }
    }
    if (row < rows && lane == 0 && warp % SHARE == 0) {
        float sum = sums[0];
#if GATE
        const unsigned rounded = packed(sums[0], sums[1]);
        sum = low(rounded) / (1 + __expf(-low(rounded))) * high(rounded);
#endif
        out[row] = (unsigned short)packed(sum, 0.0f);
    }
}
