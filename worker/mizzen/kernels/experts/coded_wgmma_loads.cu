// SPDX-License-Identifier: Apache-2.0
// Steps of coded_wgmma.cu, to which this text is prepended, and loads of their codes, scales and inputs by a producer thread.
//
// hopper.cu is prepended to this text.

#define CONSUMERS (WARPGROUPS * 128)
#define PAIRS (8 * N_TILES)
#define SEGMENTS (MAX_PAIRS / PAIRS + (HELD < MAX_PAIRS ? HELD : MAX_PAIRS))
// Bytes in shared memory: codes of a unit and of all units in a stage, inputs of eight pairs and of all in a stage, and scales of
// a unit and of all units of a step.
#define UNIT_CODES 8192
#define STAGE_CODES (WARPGROUPS * UNIT_CODES)
#define GROUP_INPUTS 4096
#define STAGE_INPUTS (N_TILES * GROUP_INPUTS)
#define UNIT_SCALES (64 * (HIDDEN > WIDTH ? HIDDEN / 32 : WIDTH / 32))
#define STEP_SCALES (WARPGROUPS * UNIT_SCALES)
#define SCALE_BUFFERS 2
#define INPUTS_AT (STAGES * STAGE_CODES)
#define SCALES_AT (INPUTS_AT + STAGES * STAGE_INPUTS)

// Sizes of a projection: gate and up, or down.
template <bool HAS_GATE>
struct Sizes {
    static constexpr bool has_gate = HAS_GATE;
    static constexpr int columns = has_gate ? HIDDEN : WIDTH, size = has_gate ? WIDTH : HIDDEN, rows = size * (1 + has_gate), scales = columns / 32;
    static constexpr int blocks = (columns + 127) / 128, stages = (blocks + 1) / 2;
    static constexpr int unit_outputs = has_gate ? 32 : 64, units = size / unit_outputs, steps = (units + WARPGROUPS - 1) / WARPGROUPS;
    // Columns of a row of outputs in memory.
    static constexpr int pitch = has_gate ? (size + 127) / 128 * 128 : size;
};
typedef Sizes<true> GateUp;
typedef Sizes<false> Down;

// Pairs of an expert that are multiplied together; `first` is the number of pairs before them in the order of experts.
struct Segment {
    u16 expert, first, count;
};

// Units of an expert that are multiplied together.
struct Step {
    Segment pairs;
    int segment, unit, units;
};

struct Projection {
    const unsigned char* scales;
    const u16* bias;
    u16* out;
};

// `order` are the pairs in the order of experts, and `done` counts the warps that have written their inner elements, by
// segment.
struct Problem {
    Projection gate_up, down;
    const int* order;
    int* done;
    float limit, slope;
};

template <class S>
__device__ __forceinline__ const Projection& projection(const Problem& all) { return S::has_gate ? all.gate_up : all.down; }

// Shared-memory addresses of the stages' parts and barriers.
struct Pipeline {
    u32 codes, inputs, scales, full, empty, scales_full, scales_empty;
};

// A place in a ring of COUNT, and the parity of its barriers.
struct Ring {
    int slot, parity;
};

template <int COUNT>
__device__ __forceinline__ void advance(Ring& at) {
    if (++at.slot == COUNT) at.slot = 0, at.parity ^= 1;
}

template <class S>
__device__ __forceinline__ Step step_at(const Segment* segments, int step) {
    const int segment = step / S::steps, unit = step % S::steps * WARPGROUPS;
    return {segments[segment], segment, unit, min(WARPGROUPS, S::units - unit)};
}

// Adds up `value` over the lanes before this one and itself.
__device__ __forceinline__ int add_lanes_before(int value) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, value, i);
        if ((int)threadIdx.x % 32 >= i) value += other;
    }
    return value;
}

// Finds the pairs of each expert and returns the number of segments, which are in the order of experts. All threads call it.
__device__ __forceinline__ int find_segments(Segment* segments, int* counts, const long long* chosen, int pairs) {
    __shared__ int total;
    for (int i = threadIdx.x; i < HELD; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        long long expert;
        asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(expert) : "l"(chosen + i) : "memory");
        if (expert >= 0 && expert < HELD) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int first = 0, segment = 0;
        for (int base = 0; base < HELD; base += 32) {
            const int expert = base + threadIdx.x, count = expert < HELD ? counts[expert] : 0;
            // Pairs in the low half, segments in the high half.
            const int own = count | (count + PAIRS - 1) / PAIRS << 16, sum = add_lanes_before(own), before = sum - own;
            for (int i = 0; i < own >> 16; i++)
                segments[segment + (before >> 16) + i] = {(u16)expert, (u16)(first + (before & 0xffff) + i * PAIRS), (u16)min(PAIRS, count - i * PAIRS)};
            const int all = __shfl_sync(~0u, sum, 31);
            first += all & 0xffff, segment += all >> 16;
        }
        if (threadIdx.x == 0) total = segment;
    }
    __syncthreads();
    return total;
}

__device__ __forceinline__ void load_bytes(u32 target, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :: "r"(target), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}

// Loads the scales of a step: of each unit 64 rows, with a gate 32 gate rows and then their up rows.
template <class S>
__device__ __forceinline__ void load_scales(const Problem& all, const Pipeline& at, const Step& step, int slot) {
    const u32 barrier = at.scales_full + slot * 8;
    constexpr int bytes = S::unit_outputs * S::scales;
    expect_bytes(barrier, step.units * 64 * S::scales);
    for (int i = 0; i < step.units; i++) {
        const size_t row = (size_t)step.pairs.expert * S::rows + (step.unit + i) * S::unit_outputs;
        const unsigned char* const from = projection<S>(all).scales + row * S::scales;
        const u32 target = at.scales + slot * STEP_SCALES + i * UNIT_SCALES;
        load_bytes(target, from, bytes, barrier);
        if (S::has_gate) load_bytes(target + bytes, from + S::size * S::scales, bytes, barrier);
    }
}

// Loads 128 bytes of the codes of each row of a unit. With a gate, eight gate rows alternate with their eight up rows.
template <class S>
__device__ __forceinline__ void load_unit(const TensorMap* map, u32 target, u32 barrier, int stage, int expert, int unit) {
    if constexpr (S::has_gate)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4, %4, %5}], [%2], %6;"
            :: "r"(target), "l"(map), "r"(barrier), "r"(stage * 128), "r"(0), "r"(expert * (S::size / 4) + unit * 4), "l"(EVICT_FIRST) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4}], [%2], %5;"
            :: "r"(target), "l"(map), "r"(barrier), "r"(stage * 128), "r"(expert * S::size + unit * 64), "l"(EVICT_FIRST) : "memory");
}

__device__ __forceinline__ int input_groups(const Step& step) { return (step.pairs.count + 7) / 8; }

// Announces the bytes of a stage and loads its codes.
template <class S>
__device__ __forceinline__ void load_codes(const TensorMap* map, const Pipeline& at, const Step& step, int stage, int slot) {
    const u32 barrier = at.full + slot * 8;
    expect_bytes(barrier, step.units * UNIT_CODES + input_groups(step) * GROUP_INPUTS);
    for (int i = 0; i < step.units; i++)
        load_unit<S>(map, at.codes + slot * STAGE_CODES + i * UNIT_CODES, barrier, stage, step.pairs.expert, step.unit + i);
}

// Loads the inputs of a stage: four parts of 64 columns of eight pairs at a time. Those behind the last pair of the segment are
// of other experts, and their sums are not used.
__device__ __forceinline__ void load_inputs(const TensorMap* map, const Pipeline& at, const Step& step, int stage, int slot) {
    for (int i = 0; i < input_groups(step); i++)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4, %5}], [%2], %6;"
            :: "r"(at.inputs + slot * STAGE_INPUTS + i * GROUP_INPUTS), "l"(map), "r"(at.full + slot * 8), "r"(0),
            "r"(step.pairs.first + i * 8), "r"(stage * 4), "l"(EVICT_LAST) : "memory");
}

// Says, for each step of gate and up, that its inner elements are written. Consumers count warps in `written`: a thread of another
// warp waits for their writes to become visible, so that they need not.
__device__ __forceinline__ void announce_inner(const Problem& all, const Segment* segments, u32 written, int steps) {
    int target = 0;
    for (int i = blockIdx.x; i < steps; i += gridDim.x) {
        const Step step = step_at<GateUp>(segments, i);
        target += step.units * 4;
        int count;
        do asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(count) : "r"(written) : "memory");
        while (count < target && (__nanosleep(100), true));
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(all.done + step.segment), "r"(step.units * 4) : "memory");
    }
}

// Waits until all inner elements of a segment are written, which TMA may then read.
__device__ __forceinline__ void wait_for_inner(const int* done) {
    int count;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(done) : "memory");
    while (count < GateUp::units * 4);
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The producer's places in both rings.
struct Producer {
    Ring stages, scales;
};

// Loads the stages of a step. Codes do not depend on the kernel before, so the first ones are loaded before it ends.
template <class S>
__device__ __forceinline__ void produce_step(const Problem& all, const TensorMap* inputs, const TensorMap* weights, const Pipeline& at, Producer& own, const Step& step, bool is_first) {
    wait_barrier(at.scales_empty + own.scales.slot * 8, own.scales.parity);
    load_scales<S>(all, at, step, own.scales.slot);
    advance<SCALE_BUFFERS>(own.scales);
    if (is_first) {
        for (int i = 0; i < min(STAGES, S::stages); i++) load_codes<S>(weights, at, step, i, i);
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    if (!S::has_gate) wait_for_inner(all.done + step.segment);
    for (int stage = 0; stage < S::stages; stage++) {
        const int slot = own.stages.slot;
        if (!is_first || stage >= STAGES) {
            wait_barrier(at.empty + slot * 8, own.stages.parity);
            load_codes<S>(weights, at, step, stage, slot);
        }
        load_inputs(inputs, at, step, stage, slot);
        advance<STAGES>(own.stages);
    }
}
