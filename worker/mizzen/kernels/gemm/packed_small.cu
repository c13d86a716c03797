// SPDX-License-Identifier: Apache-2.0
// GEMM over packed quantized weights for up to 8 * N_TILES rows of x: out = x * transpose(weight), x and out bfloat16,
// float32 accumulation.
//
// Weight rows are the M dimension of mma.m16n8k16 and rows of x its N dimension.
//
//   unit       TILES tiles of 16 weight rows: 1, 2 or all 4 of a strip
//   grid       clusters times SPLIT_K; a cluster computes a range of units
//   cluster    SPLIT_K blocks, each with its part of the columns; they add up their sums through distributed shared memory
//   step       consecutive columns of a unit, one stage of CHUNKS chunks of codes (512 bytes for each tile) for each of the
//              WARPS warps of a block; bulk copies load it into a slot of a ring, with its scales and zero points
//
// A stage is multiplied group by group; the sums of a group are scaled in float32 and then added. Warps keep the sums of up
// to SAVED units in registers and then add them up. With NORM_COLUMNS, there is one row of x, and every block normalises it
// first. bf16.cu, hopper.cu, fragments.cu and row_norm.cu are prepended to this text.

#define ROW 0
#define OCTET 1
#define GROUP 2
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#define THREADS (WARPS * 32)
#define UNIT_ROWS (TILES * 16)
#define STRIP_UNITS (4 / TILES)
#define CHUNK_COLUMNS (CODES == UINT4 ? 64 : 32)
#define CHUNK_BYTES (TILES * 512)
#define STAGE_COLUMNS (CHUNKS * CHUNK_COLUMNS)
#define STAGE_BYTES (CHUNKS * CHUNK_BYTES)
#define STEP_COLUMNS (WARPS * STAGE_COLUMNS)
// Columns of a stage that share a scale, and groups that the columns of a step touch at most.
#define PART_COLUMNS (SCALE_LAYOUT != ROW && GROUP_COLUMNS < STAGE_COLUMNS ? GROUP_COLUMNS : STAGE_COLUMNS)
#define STEP_GROUPS (SCALE_LAYOUT == ROW ? 1 : (STEP_COLUMNS + GROUP_COLUMNS - 1) / GROUP_COLUMNS + 1)
#define SCALE_SIZE (SCALE_TYPE == FLOAT32 ? 4 : 2)
#define GROUP_SCALE_BYTES (SCALE_LAYOUT == ROW ? 0 : SCALE_LAYOUT == OCTET ? 32 : 64 * SCALE_SIZE)
#define GROUP_ZERO_BYTES (HAS_ZEROS ? 64 : 0)
// Offsets of scales and zero points in a slot.
#define SCALES_AT (WARPS * STAGE_BYTES)
#define ZEROS_AT (SCALES_AT + STEP_GROUPS * GROUP_SCALE_BYTES)
#define SLOT_BYTES ((ZEROS_AT + STEP_GROUPS * GROUP_ZERO_BYTES + 127) / 128 * 128)
#define RING_BYTES (SLOTS * SLOT_BYTES)
#define OWN_ROWS (UNIT_ROWS / SPLIT_K)
// Floats between the sums of two rows of x, such that the stores of a warp do not conflict.
#define PITCH (UNIT_ROWS + 4)
#define MAX_STEPS 64

// Weight [strips, stages of STAGE_COLUMNS], x [count, columns] and out [count, outputs].
struct Operands {
    const unsigned char *codes, *scales, *zeros;
    const u16* x;
    u16* out;
    int stages, groups, columns, outputs, count;
    // Beginning of the next product's weight, whose first `next_bytes` bytes are loaded into the L2 cache.
    const unsigned char* next;
    int next_bytes;
};

// Part of a block: units, stages of the columns, and steps of a unit.
struct Part {
    int first_unit, units, first_stage, last_stage, steps;
};

// Shared-memory addresses.
struct Places {
    unsigned char *ring, *inputs;
    float *warp_sums, *row_scales, *cluster_sums;
    u32 full, empty, ready;
};

// Sums of a warp: the rows of a unit for 8 * N_TILES rows of x, in the C fragments of the MMAs.
struct Sums {
    float d[TILES][N_TILES][4];
};

__device__ __forceinline__ void bulk_load(u32 target, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :: "r"(target), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned* b, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}

// d = a * b, plus d unless `fresh`.
__device__ __forceinline__ void mma(float* d, const unsigned* a, unsigned b0, unsigned b1, bool fresh) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
          "f"(fresh ? 0 : d[0]), "f"(fresh ? 0 : d[1]), "f"(fresh ? 0 : d[2]), "f"(fresh ? 0 : d[3]));
}

// Returns the group of a stage's first column.
__device__ __forceinline__ int group_of(int stage) {
#if SCALE_LAYOUT == ROW
    return 0;
#else
    return stage * STAGE_COLUMNS / GROUP_COLUMNS;
#endif
}

// Loads the codes, scales and zero points of a step into a slot; all lanes of one warp take part.
__device__ __forceinline__ void load_step(const Operands& all, const Part& part, u32 slot, u32 full, int unit, int step) {
    const int lane = threadIdx.x % 32, strip = (part.first_unit + unit) / STRIP_UNITS, within = (part.first_unit + unit) % STRIP_UNITS;
    const int first = part.first_stage + step * WARPS, last = min(first + WARPS, part.last_stage), first_group = group_of(first);
    const int groups = group_of(last - 1) + STAGE_COLUMNS / PART_COLUMNS - first_group;
    const size_t group = (size_t)strip * all.groups + first_group;
    const unsigned char* codes = all.codes + ((size_t)strip * all.stages + first) * (CHUNKS * 2048);
    if (lane == 0) {
        expect_bytes(full, (last - first) * STAGE_BYTES + groups * (GROUP_SCALE_BYTES + GROUP_ZERO_BYTES));
        if (TILES == 4) bulk_load(slot, codes, (last - first) * STAGE_BYTES, full, EVICT_FIRST);
        if (GROUP_SCALE_BYTES) bulk_load(slot + SCALES_AT, all.scales + group * GROUP_SCALE_BYTES, groups * GROUP_SCALE_BYTES, full, EVICT_FIRST);
        if (GROUP_ZERO_BYTES) bulk_load(slot + ZEROS_AT, all.zeros + group * 64, groups * 64, full, EVICT_FIRST);
    }
    if (TILES < 4)
        for (int i = lane; i < (last - first) * CHUNKS; i += 32)
            bulk_load(slot + i * CHUNK_BYTES, codes + i * 2048 + within * CHUNK_BYTES, CHUNK_BYTES, full, EVICT_FIRST);
}

// Next step to load: its unit, counted from the block's first, and its slot.
struct Cursor {
    int unit, step, slot, parity;

    __device__ __forceinline__ void load(const Operands& all, const Part& part, const Places& at) const {
        load_step(all, part, shared_address(at.ring) + slot * SLOT_BYTES, at.full + slot * 8, unit, step);
    }
    __device__ __forceinline__ void advance(const Part& part) {
        if (++step == part.steps) step = 0, unit++;
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// Starts to load this block's share of the next product's weight into the L2 cache, in pieces of 16 KiB. A warp calls it once
// the block's last load is issued, so that these loads do not delay those of the block.
__device__ __forceinline__ void prefetch_next(const Operands& all) {
    const int piece = 16384, count = 32 * gridDim.x;
    for (int i = blockIdx.x + threadIdx.x % 32 * gridDim.x; i * piece < all.next_bytes; i += count)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
            :: "l"(all.next + (size_t)i * piece), "r"(min(piece, all.next_bytes - i * piece)) : "memory");
}

// Marks the slot of step `i` as used by this warp. In turn, warps load the next step into the slot of the step before, which
// most often all warps have used already.
__device__ __forceinline__ void release_slot(const Operands& all, const Part& part, const Places& at, Cursor& next, int slot, int i) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at.empty + slot * 8) : "memory");
    if (i == 0) return;
    if (threadIdx.x / 32 == i % WARPS && next.unit < part.units) {
        wait_barrier(at.empty + next.slot * 8, next.parity);
        next.load(all, part, at);
        __syncwarp();
        next.advance(part);
        if (next.unit == part.units) prefetch_next(all);
        return;
    }
    next.advance(part);
}

// Returns the bytes of a row of x for one step; the last step may have fewer columns.
__device__ __forceinline__ int input_bytes(const Operands& all, const Part& part, int step) {
    const int first = (part.first_stage + step * WARPS) * STAGE_COLUMNS;
    return (min(min(first + STEP_COLUMNS, part.last_stage * STAGE_COLUMNS), all.columns) - first) * 2;
}

// Loads this lane's scales of a group: of the rows lane / 4 and lane / 4 + 8 of each tile. `tile` is the first of the strip.
__device__ __forceinline__ void load_scales(float (*scales)[2], const unsigned char* at, int tile) {
    const int first = (SCALE_LAYOUT == GROUP ? threadIdx.x % 32 / 4 * 4 : 0) + tile;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        if (SCALE_LAYOUT == OCTET || SCALE_TYPE == FLOAT32) {
            const float2 pair = ((const float2*)at)[first + i];
            scales[i][0] = pair.x, scales[i][1] = pair.y;
        } else {
            const unsigned pair = ((const unsigned*)at)[first + i];
            if (SCALE_TYPE == BFLOAT16) scales[i][0] = bf16_low(pair), scales[i][1] = bf16_high(pair);
            else asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(scales[i][0]), "=f"(scales[i][1]) : "r"(pair));
        }
    }
}

// Multiplies one stage by the columns of x whose fragments start at `inputs`, one address for each N tile. `scales_at` and
// `zeros_at` are those of the stage's first group.
__device__ __forceinline__ void multiply_stage(Sums& sums, const unsigned char* stage, const unsigned char* scales_at, const unsigned char* zeros_at, int first_tile, const u32* inputs) {
    const int lane = threadIdx.x % 32;
    Sums part;
    uint4 codes[TILES];
    ZeroPair zeros[TILES];
#pragma unroll
    for (int column = 0; column < STAGE_COLUMNS; column += 32) {
        const int group = column / PART_COLUMNS;
        const bool starts = column % PART_COLUMNS == 0, ends = (column + 32) % PART_COLUMNS == 0;
        unsigned b[N_TILES][4];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) load_matrices(b[n], inputs[n] + column * 2);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (column % CHUNK_COLUMNS == 0) codes[tile] = ((const uint4*)stage)[(column / CHUNK_COLUMNS * TILES + tile) * 32 + lane];
            if (starts) zeros[tile] = HAS_ZEROS ? convert_zeros(((const u16*)(zeros_at + group * 64))[lane / 4 * 4 + first_tile + tile]) : ZeroPair{0x43084308u, 0x43084308u};
        }
        Sums& target = SCALE_LAYOUT == ROW ? sums : part;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const unsigned words[4] = {codes[tile].x, codes[tile].y, codes[tile].z, codes[tile].w};
#pragma unroll
            for (int step = 0; step < 2; step++) {
                unsigned a[4];
                convert_fragment(a, words, column % CHUNK_COLUMNS / 16 + step, zeros[tile]);
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
                    mma(target.d[tile][n], a, b[n][2 * step], b[n][2 * step + 1], SCALE_LAYOUT != ROW && starts && step == 0);
            }
        }
        if (SCALE_LAYOUT != ROW && ends) {
            float scales[TILES][2];
            load_scales(scales, scales_at + group * GROUP_SCALE_BYTES, first_tile);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sums.d[tile][n][i] = fmaf(scales[tile][i / 2], part.d[tile][n][i], sums.d[tile][n][i]);
        }
    }
}

// Writes the sums of a warp for the first `count` rows of x to [count, PITCH] floats.
__device__ __forceinline__ void store_sums(float* target, const Sums& sums, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int input = n * 8 + lane % 4 * 2 + i % 2;
            if (input < count)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) target[input * PITCH + tile * 16 + i / 2 * 8 + lane / 4] = sums.d[tile][n][i];
        }
}

// Adds up the sums of all warps for one weight row and row of x, in the order of the warps.
__device__ __forceinline__ float add_warps(const float* at, int count) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += at[warp * count * PITCH];
    return sum;
}

// Adds up the sums of all blocks of the cluster, in the order of their columns; `stride` is the distance of their sums.
__device__ __forceinline__ float add_splits(const float* at, int stride) {
    float sum = 0;
#pragma unroll
    for (int from = 0; from < SPLIT_K; from++) sum += at[from * stride];
    return sum;
}

__device__ __forceinline__ void store_output(u16* out, float value, int output, int outputs, int input) {
    if (output < outputs) out[(size_t)input * outputs + output] = (u16)pack_bf16x2(value, 0);
}

// Computes outputs from the sums of `rows` weight rows of a unit, from row `first` on. `sum(input, row)` returns the sum of
// a row, counted from `first`; `row_scales` holds the scales of the unit's rows.
template <typename Sum>
__device__ __forceinline__ void write_outputs(const Operands& all, int unit, int first, int rows, const float* row_scales, Sum sum) {
    const int own = SWIGLU ? rows / 2 : rows, output = (unit * UNIT_ROWS + first) / (SWIGLU ? 2 : 1);
    for (int i = threadIdx.x; i < all.count * own; i += THREADS) {
        const int input = i / own, within = i % own;
        if (SWIGLU) {
            const int row = within / 8 * 16 + within % 8;
            float gate = sum(input, row), up = sum(input, row + 8);
            if (SCALE_LAYOUT == ROW) gate *= row_scales[first + row], up *= row_scales[first + row + 8];
            store_output(all.out, swiglu(gate, up), output + within, all.outputs, input);
        } else {
            float value = sum(input, within);
            if (SCALE_LAYOUT == ROW) value *= row_scales[first + within];
            store_output(all.out, value, output + within, all.outputs, input);
        }
    }
}

// Adds up the sums of the block's unit `i`: those of its warps, and those of the cluster's blocks, which receive each
// other's sums for their rows in `cluster_sums` [SPLIT_K, max_units, count, OWN_ROWS]. Without a cluster, writes outputs.
__device__ __forceinline__ void reduce_unit(const Operands& all, const Part& part, const Sums& sums, const Places& at, int i, int max_units) {
    const int count = all.count, rank = blockIdx.x % SPLIT_K;
    const float* warp_sums = at.warp_sums;
    __syncthreads();  // the sums of the previous unit have been read
    store_sums(at.warp_sums + threadIdx.x / 32 * count * PITCH, sums, count);
    __syncthreads();
    if (SPLIT_K == 1) {
        write_outputs(all, part.first_unit + i, 0, UNIT_ROWS, at.row_scales + i * UNIT_ROWS,
            [&](int input, int row) { return add_warps(warp_sums + input * PITCH + row, count); });
        return;
    }
    for (int j = threadIdx.x; j < count * UNIT_ROWS; j += THREADS) {
        const int input = j / UNIT_ROWS, row = j % UNIT_ROWS;
        const float* target = at.cluster_sums + ((rank * max_units + i) * count + input) * OWN_ROWS + row % OWN_ROWS;
        asm volatile("st.shared::cluster.f32 [%0], %1;"
            :: "r"(map_to_rank(shared_address(target), row / OWN_ROWS)), "f"(add_warps(warp_sums + input * PITCH + row, count)) : "memory");
    }
}

// Multiplies all steps of all units. `fragments` are addresses of the first columns of x.
__device__ __forceinline__ void multiply_units(const Operands& all, const Part& part, const Places& at, Cursor next, const u32* fragments, int max_units) {
    const int warp = threadIdx.x / 32;
    Sums saved[SAVED];
    int slot = 0, parity = 0, all_steps = 0;
    for (int unit = 0; unit < part.units; unit++) {
        Sums sums = {};
        for (int step = 0; step < part.steps; step++) {
            const int first = part.first_stage + step * WARPS, stage = first + warp, group = group_of(stage) - group_of(first);
            u32 inputs[N_TILES];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) inputs[n] = fragments[n] + (stage - part.first_stage) * STAGE_COLUMNS * 2;
            // A normalised row of x is in shared memory already; the first barrier then waits for scales of rows alone.
            if (unit == 0 && (!NORM_COLUMNS || step == 0)) wait_barrier(at.ready + step * 8, 0);
            wait_barrier(at.full + slot * 8, parity);
            const unsigned char* data = at.ring + slot * SLOT_BYTES;
            if (stage < part.last_stage)
                multiply_stage(sums, data + warp * STAGE_BYTES, data + SCALES_AT + group * GROUP_SCALE_BYTES, data + ZEROS_AT + group * GROUP_ZERO_BYTES,
                    (part.first_unit + unit) % STRIP_UNITS * TILES, inputs);
            release_slot(all, part, at, next, slot, all_steps++);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
        const int place = unit % SAVED;
#pragma unroll
        for (int j = 0; j < SAVED; j++)
            if (j == place) saved[j] = sums;
        if (place < SAVED - 1 && unit + 1 < part.units) continue;
#pragma unroll 1
        for (int done = 0; done <= place; done++) {
#pragma unroll
            for (int j = 0; j < SAVED; j++)
                if (j == done) sums = saved[j];
            reduce_unit(all, part, sums, at, unit - place + done, max_units);
        }
    }
}

// Initialises the barriers and loads what does not depend on the previous kernel: weights and scales. One warp calls it.
__device__ __forceinline__ void start_loads(const Operands& all, const Part& part, const Places& at, Cursor next) {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < SLOTS; i += 32) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at.full + i * 8) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at.empty + i * 8), "n"(WARPS) : "memory");
    }
    for (int i = lane; i < part.steps; i += 32) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at.ready + i * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    for (int i = 0; i < SLOTS && next.unit < part.units; i++) {
        next.load(all, part, at);
        next.advance(part);
    }
    if (next.unit == part.units) prefetch_next(all);
    if (lane > 0) return;
    const int scale_bytes = SCALE_LAYOUT == ROW ? part.units * UNIT_ROWS * 4 : 0;
    expect_bytes(at.ready, (NORM_COLUMNS ? 0 : all.count * input_bytes(all, part, 0)) + scale_bytes);
    if (scale_bytes) bulk_load(shared_address(at.row_scales), all.scales + (size_t)part.first_unit * UNIT_ROWS * 4, scale_bytes, at.ready, EVICT_FIRST);
}

// Loads a row of x, step by step.
__device__ __forceinline__ void load_inputs(const Operands& all, const Part& part, const Places& at, int input, int pitch) {
    for (int step = 0; step < part.steps; step++) {
        const int bytes = input_bytes(all, part, step), offset = step * STEP_COLUMNS;
        if (input == 0 && step > 0) expect_bytes(at.ready + step * 8, all.count * bytes);
        bulk_load(shared_address(at.inputs) + input * pitch + offset * 2,
            all.x + (size_t)input * all.columns + part.first_stage * STAGE_COLUMNS + offset, bytes, at.ready + step * 8, EVICT_LAST);
    }
}

// Shared memory: the ring, then the block's columns of x [count, pitch bytes], scales of rows [max_units, UNIT_ROWS], and the
// sums from all blocks of the cluster for this block's rows. The sums of the warps [WARPS, count, PITCH] are at `sums_at`:
// behind them, or in the ring if a block computes no more than SAVED units. A cluster computes `few_units` units, the first
// `more` clusters one more. `residual`, `norm_weight`, `new_residual` and `epsilon` belong to the norm of NORM_COLUMNS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
packed_small(const unsigned char* codes, const unsigned char* scales, const unsigned char* zeros, const u16* x, u16* out,
             int stages, int groups, int columns, int outputs, int count, int few_units, int more, int max_units, int sums_at,
             const u16* residual, const u16* norm_weight, u16* new_residual, float epsilon, const unsigned char* next, int next_bytes) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(8) u64 full[SLOTS], empty[SLOTS], ready[MAX_STEPS];
    asm volatile("griddepcontrol.launch_dependents;");
    const Operands all = {codes, scales, zeros, x, out, stages, groups, columns, outputs, count, next, next_bytes};
    const int lane = threadIdx.x % 32, cluster = blockIdx.x / SPLIT_K, rank = blockIdx.x % SPLIT_K;
    Part part = {cluster * few_units + min(cluster, more), few_units + (cluster < more), rank * stages / SPLIT_K, (rank + 1) * stages / SPLIT_K, 0};
    part.steps = (part.last_stage - part.first_stage + WARPS - 1) / WARPS;
    const int pitch = (stages + SPLIT_K - 1) / SPLIT_K * STAGE_COLUMNS * 2 + 16;
    unsigned char* inputs = shared + RING_BYTES;
    float* row_scales = (float*)(inputs + count * pitch);
    float* cluster_sums = row_scales + (SCALE_LAYOUT == ROW ? max_units * UNIT_ROWS : 0);
    const Places at = {shared, inputs, (float*)(shared + sums_at), row_scales, cluster_sums, shared_address(full), shared_address(empty), shared_address(ready)};
    Cursor cursor = {0, 0, 0, 1};
    if (threadIdx.x < 32) start_loads(all, part, at, cursor);
    for (int i = 0; i < SLOTS; i++) cursor.advance(part);
    // Padding columns of x are zero.
    const int padding = max(part.last_stage * STAGE_COLUMNS - columns, 0), filled = (part.last_stage - part.first_stage) * STAGE_COLUMNS - padding;
    for (int i = threadIdx.x; i < count * padding; i += THREADS) *(u16*)(inputs + i / padding * pitch + (filled + i % padding) * 2) = 0;
#if NORM_COLUMNS
    const RowNorm norm = {residual, norm_weight, new_residual, epsilon};
    uint4 norm_scales[NORM_VECTORS];
    load_norm_weight(norm_scales, norm);
#endif
    __syncthreads();
    if (SPLIT_K > 1) cluster_sync_relaxed();  // the other blocks have started, so they can receive sums

    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if NORM_COLUMNS
    normalise_row(x, norm, norm_scales, inputs, blockIdx.x == 0);
#else
    if (threadIdx.x < count) load_inputs(all, part, at, threadIdx.x, pitch);
#endif
    // Rows of x that do not exist are read from the last one; their sums are dropped.
    u32 fragments[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) fragments[n] = shared_address(inputs) + min(n * 8 + lane % 8, count - 1) * pitch + lane / 8 * 16;
    multiply_units(all, part, at, cursor, fragments, max_units);
    if (SPLIT_K > 1) {
        cluster_sync();
        for (int i = 0; i < part.units; i++)
            write_outputs(all, part.first_unit + i, rank * OWN_ROWS, OWN_ROWS, row_scales + i * UNIT_ROWS, [&](int input, int row) {
                return add_splits(cluster_sums + (i * count + input) * OWN_ROWS + row, max_units * count * OWN_ROWS);
            });
    }
}
