// SPDX-License-Identifier: Apache-2.0
// Tiles of the kernel of many rows per expert (many_rows.cu), and the producer that loads their operands.
//
// many_rows.cu describes the compile options and `wgmma<N>`. bf16.cu and gemm/hopper.cu are prepended to this
// text.

#define STAGE_COLUMNS (FP8 ? 128 : 64)
#define TILE_ROWS 256
#define WEIGHT_BYTES (TILE_ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + PAIRS * 128)
#define PRODUCER_THREADS 128
// Whether the producer's threads copy a part of each stage with cp.async.
#define COPIES (SWIGLU || FP8)
// With at least STAGES + 1 tiles, no tile that a consumer still needs is overwritten, even if each has a single stage.
#define TILE_RING 8

#if CLUSTER > 1
#define MULTICAST ".multicast::cluster"
#define MULTICAST_OPERAND ", %6"
#else
#define MULTICAST ""
#define MULTICAST_OPERAND ""
#endif

// A block of the sorted pairs of one expert, as sort_pairs.cu writes it, with the number of its expert's first block.
struct __align__(16) PairBlock {
    int expert, start, count, unused;
    int first_block, expert_blocks, unused1, unused2;
};

// What a thread block multiplies: `count` sorted pairs from `start` on, by the weight rows of the tile `rows`.
struct __align__(16) Tile {
    int expert, start, count, rows;
};

// The tiles of a cluster: every `step`-th one of `total` from `first` on. Each block of pairs has `tiles` of them.
struct Work {
    const PairBlock* blocks;
    int tiles, total, first, step;
};

struct Pipeline {
    u32 slot, phase;
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

struct Inputs {
    const unsigned char* values;
    const float* scales;
    const int* pairs;
    int per_row, row_bytes, scale_stride;
};

__device__ __forceinline__ int block_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return CLUSTER > 1 ? rank : 0;
}

// Returns the tile of a number. The blocks of an expert follow each other with the same weight rows.
__device__ __forceinline__ Tile find_tile(const Work& work, int number, int rank) {
    const PairBlock any = work.blocks[number / work.tiles];
    const int place = number - any.first_block * work.tiles, rows = place / any.expert_blocks;
    const PairBlock own = work.blocks[any.first_block + place - rows * any.expert_blocks];
    Tile tile = {own.expert, own.start, own.count, rows};
    if (CLUSTER > 1) {
        const int half = (own.count + 2 * PAIR_STEP - 1) / (2 * PAIR_STEP) * PAIR_STEP;
        tile.start += rank * half;
        tile.count = max(0, rank ? own.count - half : min(half, own.count));
    }
    return tile;
}

// Loads this block's part of a tile's weight rows into all blocks of the cluster.
__device__ __forceinline__ void load_weights(const TensorMap* map, u32 target, u32 barrier, int column, const Tile& tile, int rank) {
    const int row = tile.rows * TILE_ROWS + rank * (TILE_ROWS / CLUSTER);
    const u16 mask = (1 << CLUSTER) - 1;
    target += rank * (WEIGHT_BYTES / CLUSTER);
#if SWIGLU
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes" MULTICAST " [%0], [%1, {%3, 0, 0, %4, %5}], [%2]" MULTICAST_OPERAND ";"
        :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row / 16), "r"(tile.expert), "h"(mask) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes" MULTICAST " [%0], [%1, {%3, %4, %5}], [%2]" MULTICAST_OPERAND ";"
        :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(tile.expert), "h"(mask) : "memory");
#endif
}

// Loads 128 bytes of `boxes` boxes of 16 rows of x from `row` on.
__device__ __forceinline__ void load_inputs(const TensorMap* map, u32 target, u32 barrier, int column, int row, int boxes) {
    for (int i = 0; i < boxes; i++)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            :: "r"(target + i * 2048), "l"(map), "r"(barrier), "r"(column), "r"(row + i * 16) : "memory");
}

__device__ __forceinline__ void copy_async_16(u32 target, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_4(u32 target, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(target), "l"(from) : "memory");
}

// Producer: loads every stage of all tiles as soon as it is free. Eight threads copy 128 bytes of a row of x, in the swizzle.
__device__ __forceinline__ void produce(const TensorMap* weights, const TensorMap* input_map, const Inputs& inputs, const Work& work, Tile* ring, u32 base, u32 scale_base, u32 full, u32 empty, int steps, int rank) {
    const int thread = threadIdx.x % PRODUCER_THREADS, row = thread / 8;
    const u32 place = WEIGHT_BYTES + row * 128 + (((thread % 8) ^ (row % 8)) << 4);
    Pipeline at = {0, 1};
    int sequence = 0;
    for (int number = work.first; number < work.total; number += work.step, sequence++) {
        const Tile tile = find_tile(work, number, rank);
        if (thread == 0) ring[sequence % TILE_RING] = tile;
#if SWIGLU
        u32 from[PAIRS / 16];
#pragma unroll
        for (int i = 0; i < PAIRS / 16; i++) {
            const int own = row + i * 16;
            from[i] = own < tile.count ? (u32)(inputs.pairs[tile.start + own] / inputs.per_row) * (inputs.row_bytes / 16) + thread % 8 : 0;
        }
#endif
#if FP8
        const bool has_scale = thread < tile.count;
        const float* scale = inputs.scales;
        if (has_scale) scale += SWIGLU ? inputs.pairs[tile.start + thread] / inputs.per_row : tile.start + thread;
#endif
        const int boxes = SWIGLU ? 0 : (tile.count + 15) / 16;
        for (int step = 0; step < steps; step++) {
            const u32 target = base + at.slot * STAGE_BYTES, ready = full + at.slot * 8;
            wait_barrier(empty + at.slot * 8, at.phase);
            if (thread == 0) {
                expect_bytes(ready, WEIGHT_BYTES + boxes * 2048);
                load_weights(weights, target, ready, step * STAGE_COLUMNS, tile, rank);
                load_inputs(input_map, target + WEIGHT_BYTES, ready, step * STAGE_COLUMNS, tile.start, boxes);
            }
#if SWIGLU
#pragma unroll
            for (int i = 0; i < PAIRS / 16; i++)
                if (row + i * 16 < tile.count) copy_async_16(target + place + i * 2048, inputs.values + (size_t)(from[i] + step * 8) * 16);
#endif
#if FP8
            if (has_scale) copy_async_4(scale_base + (at.slot * PAIRS + thread) * 4, scale + (size_t)step * inputs.scale_stride);
#endif
#if COPIES
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(ready) : "memory");
#endif
            at.advance();
        }
    }
}
