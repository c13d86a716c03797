// SPDX-License-Identifier: Apache-2.0
// A layer's products with quantized experts by wgmma: gate and up, the gate, and down. Codes are decoded in registers.
//
// Weight rows are the M dimension of wgmma.m64nNk16 and pairs, in the order of their experts, its N dimension.
//
//   unit       64 weight rows of an expert; of gate and up 32 each, eight of both in turn
//   segment    up to 8 * N_TILES pairs of an expert
//   step       up to WARPGROUPS consecutive units of an expert, times a segment
//   grid       persistent blocks, one for each SM; block b of n takes steps b, b + n, b + 2 n and so on, first of gate and up and
//              then of down. A step of down waits until the inner elements of its segment are written
//   block      WARPGROUPS consumer warpgroups with a unit each, a producer warp, and a warp that announces inner elements
//   stage      256 columns: 128 bytes of codes of each row, and the inputs of each pair, in the 128-byte swizzle that TMA writes
//   block of columns  128 columns: lane (g, t) = (lane / 4, lane % 4) decodes columns 32 t to 32 t + 31 of two rows, which are
//              16 bytes of each row
//
// The columns of a product may be summed in any order as long as codes and inputs have the same: inputs come in the order of
// coded_inputs.cu, and inner elements are written in it. The `wgmma_registers` functions, `fence_fragments`, bf16.cu, gate.cu,
// e2m1.cu, hopper.cu and coded_wgmma_loads.cu are prepended to this text.

// A part of a block of columns is FRAGMENTS products of 16 columns, which are decoded together and multiplied together.
#define PARTS (8 / FRAGMENTS)

__device__ __forceinline__ void arrive(u32 barrier) {
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// A thread's codes and scales of a block of columns, for two rows.
struct Codes {
    uint4 words[2];
    u32 operands[2];
};

// Row among eight that the lanes of group `g` decode: rows 0 and 4, 1 and 5 and so on belong to neighbouring lanes, so that loads
// of their codes do not conflict.
__device__ __forceinline__ int row_of_lane() {
    const int g = threadIdx.x % 32 / 4;
    return g / 2 + g % 2 * 4;
}

// Shared-memory addresses of a thread's codes and scales in the first stage, and the low half of its descriptor of inputs.
struct Lane {
    u32 codes, scales, inputs;
};

template <class S>
__device__ __forceinline__ Lane own_lane(const Pipeline& at, int scale_slot) {
    const int row = row_of_lane(), t = threadIdx.x % 4, warp = threadIdx.x / 32;
    return {
        at.codes + warp * 2048 + row * 128 + (t ^ row) * 16,
        at.scales + scale_slot * STEP_SCALES + warp / 4 * UNIT_SCALES + ((S::has_gate ? 8 : 16) * (warp % 4) + row) * S::scales + t,
        (at.inputs & 0x3FFFF) >> 4 | 1 << 16};
}

// Reads block `block` of a step, which is in stage `slot`.
template <class S>
__device__ __forceinline__ Codes read_codes(const Lane& lane, int slot, int block) {
    Codes codes;
    // The other half of the 128 bytes of a row, see the swizzle.
    const u32 from = (lane.codes + slot * STAGE_CODES) ^ (block % 2 * 64);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 exponent;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(codes.words[i].x), "=r"(codes.words[i].y), "=r"(codes.words[i].z), "=r"(codes.words[i].w) : "r"(from + i * 1024));
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent) : "r"(lane.scales + block * 4 + i * (S::has_gate ? 32 : 8) * S::scales));
        codes.operands[i] = e2m1_operand(exponent);
    }
    return codes;
}

// Decodes part `part` of a block of a warp's 16 rows to the fragments of FRAGMENTS products.
__device__ __forceinline__ void decode_part(u32* fragments, const Codes& codes, int part) {
#pragma unroll
    for (int k = 0; k < FRAGMENTS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int step = part * FRAGMENTS + k, row = i % 2;
            const uint4& words = codes.words[row];
            const u32 word = step / 2 == 0 ? words.x : step / 2 == 1 ? words.y : step / 2 == 2 ? words.z : words.w;
            fragments[k * 4 + i] = decode_e2m1(word, step % 2 * 2 + i / 2, codes.operands[row]);
        }
}

// Adds the products of part `part` of a block to the sums; `inputs` is the low half of the descriptor of the block's inputs. Eight
// pairs of them are GROUP_INPUTS apart.
template <int TILES>
__device__ __forceinline__ void multiply_part(float (&sums)[TILES * 4], u32* fragments, u32 inputs, int part) {
    const u64 high = (u64)(GROUP_INPUTS / 16 | 1 << 30) << 32;
    fence_fragments(fragments);
#pragma unroll
    for (int k = 0; k < FRAGMENTS; k++) {
        const int step = part * FRAGMENTS + k;
        wgmma_registers(sums, fragments + k * 4, high | (inputs + step / 4 * 64 + step % 4 * 2), 1);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Multiplies a block, whose first part is decoded. While the tensor cores multiply a part, the next one is decoded. Calls `release`
// when the blocks before are multiplied, and unless it is the last, `next`, which reads the next block.
//
// No register of a wgmma in flight is touched: fragments are written again after the wait for the products before the last.
template <int TILES, bool IS_LAST, class Release, class Next>
__device__ __forceinline__ void multiply_block(float (&sums)[TILES * 4], u32 (&fragments)[2][FRAGMENTS * 4], Codes& codes, u32 inputs, Release release, Next next) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if (part == PARTS - 1 && !IS_LAST) next();
        multiply_part<TILES>(sums, fragments[part % 2], inputs, part);
        if (part == PARTS - 1 && IS_LAST) break;
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (part == 0) release();
        decode_part(fragments[(part + 1) % 2], codes, (part + 1) % PARTS);
    }
}

// Multiplies a unit of a step.
template <class S, int TILES>
__device__ __forceinline__ void multiply_unit(float (&sums)[TILES * 4], const Pipeline& at, Ring& ring, int scale_slot) {
    u32 fragments[2][FRAGMENTS * 4];
    const Lane lane = own_lane<S>(at, scale_slot);
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) sums[i] = 0;
    wait_barrier(at.full + ring.slot * 8, ring.parity);
    Codes codes = read_codes<S>(lane, ring.slot, 0);
    decode_part(fragments[0], codes, 0);
    const auto inputs_of = [&] { return __shfl_sync(~0u, lane.inputs + ring.slot * (STAGE_INPUTS / 16), 0); };
    const auto nothing = [] {};
    int before = 0;
#pragma unroll 1
    for (int stage = 0; stage < S::stages - 1; stage++) {
        const u32 inputs = inputs_of();
        multiply_block<TILES, false>(sums, fragments, codes, inputs,
            [&] { if (stage > 0) arrive(at.empty + before * 8); },
            [&] { codes = read_codes<S>(lane, ring.slot, stage * 2 + 1); });
        before = ring.slot;
        multiply_block<TILES, false>(sums, fragments, codes, inputs + 128, nothing, [&] {
            advance<STAGES>(ring);
            wait_barrier(at.full + ring.slot * 8, ring.parity);
            codes = read_codes<S>(lane, ring.slot, stage * 2 + 2);
        });
    }
    const u32 inputs = inputs_of();
    const auto release = [&] { if (S::stages > 1) arrive(at.empty + before * 8); };
    if constexpr (S::blocks % 2 == 0) {
        multiply_block<TILES, false>(sums, fragments, codes, inputs, release, [&] { codes = read_codes<S>(lane, ring.slot, S::blocks - 1); });
        multiply_block<TILES, true>(sums, fragments, codes, inputs + 128, nothing, nothing);
    } else {
        multiply_block<TILES, true>(sums, fragments, codes, inputs, release, nothing);
    }
    wait_for_sums(sums);
    arrive(at.empty + ring.slot * 8);
    advance<STAGES>(ring);
}

// Passes the stages of a step to the producer, by a warpgroup without a unit.
template <class S>
__device__ __forceinline__ void skip_unit(const Pipeline& at, Ring& ring) {
    for (int i = 0; i < S::stages; i++) {
        wait_barrier(at.full + ring.slot * 8, ring.parity);
        arrive(at.empty + ring.slot * 8);
        advance<STAGES>(ring);
    }
}

// Outputs of a thread for two adjacent pairs become two outputs of one of them: those of this lane, and those of the lane that
// `mask` selects. Lanes that have `upper` take the second pair.
__device__ __forceinline__ u32 trade_outputs(float first, float second, int mask, bool upper) {
    const float other = __shfl_xor_sync(~0u, upper ? first : second, mask);
    return upper ? pack_bf16x2(other, second) : pack_bf16x2(first, other);
}

// Writes the outputs of a unit. With a gate, each lane has outputs i and i + 4 of an eight, which are neighbours in the order of
// inputs; otherwise it trades outputs with the lane that has the next row.
template <class S, int TILES>
__device__ __forceinline__ void write_outputs(const Problem& all, const float (&sums)[TILES * 4], const Step& step, int unit, int warp, float2 bias) {
    const float factor = 9223372036854775808.0f;  // 2^63, see `e2m1_operand`
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        float low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; i++) low[i] = sums[n * 4 + i] * factor + bias.x, high[i] = sums[n * 4 + 2 + i] * factor + bias.y;
        if constexpr (S::has_gate) {
            const bool upper = g % 2;
            const u32 both = trade_outputs(apply_gate(low[0], high[0], all.limit, all.slope), apply_gate(low[1], high[1], all.limit, all.slope), 4, upper);
            const int pair = n * 8 + t * 2 + upper, eight = unit * 32 + warp * 8;
            const int place = eight / 128 * 128 + eight % 32 * 4 + g / 2 * 8 + eight % 128 / 32 * 2;
            if (pair < step.pairs.count) *(u32*)(all.gate_up.out + (size_t)(step.pairs.first + pair) * S::pitch + place) = both;
        } else {
            const bool upper = g / 2 % 2;
            const u32 first = trade_outputs(low[0], low[1], 8, upper), second = trade_outputs(high[0], high[1], 8, upper);
            const int pair = n * 8 + t * 2 + upper;
            if (pair >= step.pairs.count) continue;
            u16* const out = all.down.out + (size_t)all.order[step.pairs.first + pair] * S::pitch + unit * 64 + warp * 16 + g / 4 * 2 + g % 2 * 4;
            *(u32*)out = first;
            *(u32*)(out + 8) = second;
        }
    }
}

template <class S>
__device__ __forceinline__ float2 load_biases(const Problem& all, const Step& step, int unit, int warp) {
    const u16* const from = projection<S>(all).bias + step.pairs.expert * S::rows + unit * S::unit_outputs + warp * (S::has_gate ? 8 : 16) + row_of_lane();
    return HAS_BIAS ? make_float2(bf16_low(from[0]), bf16_low(from[S::has_gate ? S::size : 8])) : make_float2(0, 0);
}

template <class S, int TILES>
__device__ __forceinline__ void run_unit(const Problem& all, const Pipeline& at, const Step& step, int unit, Ring& ring, int scale_slot, u32 written) {
    const int warp = threadIdx.x / 32 % 4;
    const float2 bias = load_biases<S>(all, step, unit, warp);
    float sums[TILES * 4];
    multiply_unit<S, TILES>(sums, at, ring, scale_slot);
    arrive(at.scales_empty + scale_slot * 8);
    write_outputs<S, TILES>(all, sums, step, unit, warp, bias);
    if (S::has_gate) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) asm volatile("red.release.cta.shared::cta.add.s32 [%0], %1;" :: "r"(written), "n"(1) : "memory");
    }
}

// Multiplies this warpgroup's unit of a step. `written` is the address of the number of warps that have written inner elements.
template <class S>
__device__ __forceinline__ void consume_step(const Problem& all, const Pipeline& at, const Step& step, Ring& ring, Ring& scales, u32 written) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 32 / 4, 0), own = step.unit + warpgroup, tiles = (step.pairs.count + 7) / 8;
    wait_barrier(at.scales_full + scales.slot * 8, scales.parity);
    if (warpgroup >= step.units) {
        skip_unit<S>(at, ring);
        arrive(at.scales_empty + scales.slot * 8);
    }
    else if (N_TILES == 1 || tiles == 1) run_unit<S, 1>(all, at, step, own, ring, scales.slot, written);
#if N_TILES >= 2
    else if (N_TILES == 2 || tiles == 2) run_unit<S, 2>(all, at, step, own, ring, scales.slot, written);
#endif
#if N_TILES >= 3
    else if (N_TILES == 3 || tiles == 3) run_unit<S, 3>(all, at, step, own, ring, scales.slot, written);
#endif
#if N_TILES >= 4
    else if (N_TILES == 4 || tiles == 4) run_unit<S, 4>(all, at, step, own, ring, scales.slot, written);
#endif
#if N_TILES >= 6
    else if (N_TILES == 6 || tiles <= 6) run_unit<S, 6>(all, at, step, own, ring, scales.slot, written);
#endif
#if N_TILES >= 8
    else run_unit<S, 8>(all, at, step, own, ring, scales.slot, written);
#endif
    advance<SCALE_BUFFERS>(scales);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, 1) coded_wgmma(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap inner_inputs,
    const __grid_constant__ TensorMap down, const long long* chosen, const unsigned char* gate_up_scales, const u16* gate_up_bias,
    const unsigned char* down_scales, const u16* down_bias, const int* order, int* done, u16* inner, u16* out, int pairs, float limit, float slope) {
    extern __shared__ unsigned char raw[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 2 * SCALE_BUFFERS];
    __shared__ Segment segments[SEGMENTS];
    __shared__ int counts[HELD], written;
    const u32 base = shared_address(raw) + (1024 - shared_address(raw) % 1024) % 1024, first = shared_address(barriers);
    const Problem all = {{gate_up_scales, gate_up_bias, inner}, {down_scales, down_bias, out}, order, done, limit, slope};
    const Pipeline at = {base, base + INPUTS_AT, base + SCALES_AT, first, first + STAGES * 8, first + 2 * STAGES * 8, first + (2 * STAGES + SCALE_BUFFERS) * 8};
    if (threadIdx.x == 0) {
        written = 0;
        for (int i = 0; i < STAGES + SCALE_BUFFERS; i++) {
            const bool is_stage = i < STAGES;
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(is_stage ? at.full + i * 8 : at.scales_full + (i - STAGES) * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                :: "r"(is_stage ? at.empty + i * 8 : at.scales_empty + (i - STAGES) * 8), "n"(WARPGROUPS * 4) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // The kernel before was launched after all blocks of the one before it had waited for the router.
    asm volatile("griddepcontrol.launch_dependents;");
    const int segment_count = find_segments(segments, counts, chosen, pairs), gate_up_steps = segment_count * GateUp::steps;
    const int steps = gate_up_steps + segment_count * Down::steps;
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS + 32) announce_inner(all, segments, shared_address(&written), gate_up_steps);
        if (threadIdx.x == CONSUMERS) {
            Producer own = {{0, 1}, {0, 1}};
            for (int step = blockIdx.x; step < steps; step += gridDim.x) {
                const bool is_first = step == blockIdx.x;
                if (step < gate_up_steps)
                    produce_step<GateUp>(all, &inputs, &gate_up, at, own, step_at<GateUp>(segments, step), is_first);
                else
                    produce_step<Down>(all, &inner_inputs, &down, at, own, step_at<Down>(segments, step - gate_up_steps), is_first);
            }
        }
        __syncwarp();
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        Ring ring = {0, 0}, scales = {0, 0};
        for (int step = blockIdx.x; step < steps; step += gridDim.x) {
            if (step < gate_up_steps)
                consume_step<GateUp>(all, at, step_at<GateUp>(segments, step), ring, scales, shared_address(&written));
            else
                consume_step<Down>(all, at, step_at<Down>(segments, step - gate_up_steps), ring, scales, shared_address(&written));
        }
    }
}
