// SPDX-License-Identifier: Apache-2.0
// Split-KV decode attention over paged KV on tensor cores: one query token per row. bf16.cu and
// decode_fragments.cu are prepended.

// q: raw QKV projections [rows, stride] whose first KV_HEADS * GQA_GROUP heads are queries, followed by keys and values; without
// FUSED_QKV, queries that are already normalised and rotated. out: [rows, KV_HEADS * GQA_GROUP, HEAD_DIM].
// With SINKS, sinks [KV_HEADS * GQA_GROUP] holds the score of each head's attention sink, times log2(e).
// The grid is (splits, KV_HEADS, rows). With PLANNED_SPLITS it is (KV_HEADS, items); an item names the row, the split, the number of
// splits of the row, and the row's first partial result; see split_plan.py.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_decode_mma(const unsigned short* q, const unsigned short* q_scales, const unsigned short* k_scales,
    const float* cosines, const float* sines, const long long* slot_mapping, const int* slots, const int* lengths,
    const int* table, unsigned char* keys, unsigned char* values, unsigned short* out,
    float* partial_sums, float* stats, int* counters, int columns, int stride,
#if PLANNED_SPLITS
    const int4* items,
#else
    int most_splits,
#endif
    float epsilon, float scale
#if SINKS
    , const float* sinks
#endif
) {
    __shared__ __align__(16) float merged[WARPS][GQA_GROUP][HEAD_DIM];
    __shared__ float max_scores[WARPS][GQA_GROUP], weight_sums[WARPS][GQA_GROUP];
    asm volatile("griddepcontrol.launch_dependents;");
#if !FUSED_QKV
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the previous kernel stored the newest keys and values
#endif
#if PLANNED_SPLITS
    const int head = blockIdx.x;
    const int4 item = __ldcg(items + blockIdx.y);
    const int row = item.x, split = item.y, most_splits = item.z;
    if (row < 0) return;
#else
    const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int length = lengths[row];
    const int* pages = table + (size_t)slots[row] * columns;
    const int last = length - FUSED_QKV;  // with FUSED_QKV, the newest token comes from the projection
    const int begin = WINDOW && length > WINDOW ? length - WINDOW : 0;
    const int end = (last + 15) / 16;
    // Splits without a tile of 16 tokens would only delay the merge, and merging takes longer than two more tiles per warp.
    const bool has_few_tiles = WINDOW && WINDOW / 16 + 1 <= 3 * WARPS;
    const int useful_splits = has_few_tiles ? 1 : (end - begin / 16 + WARPS - 1) / WARPS;
    const int splits = max(1, min(most_splits, useful_splits)), step = splits * WARPS;
    if (split >= splits) return;
    int tile = begin / 16 + split * WARPS + warp;  // index of 16 tokens

    // KV slot of token `tile * 16 + i`: its index in the first dimension of the cache.
#if PAGE_SIZE % 16 == 0
#define DECLARE_PAGE_BASE(tile, page) const size_t output = (size_t)(page) * PAGE_SIZE + (tile) * 16 % PAGE_SIZE;
#define KV_SLOT(tile, i) (output + (i))
#define PAGE_OF(tile) ((tile) < end ? pages[(tile) * 16 / PAGE_SIZE] : 0)
#else
#define DECLARE_PAGE_BASE(tile, page)
#define TOKEN(tile, i) min((tile) * 16 + (i), last - 1)
#define KV_SLOT(tile, i) ((size_t)pages[TOKEN(tile, i) / PAGE_SIZE] * PAGE_SIZE + TOKEN(tile, i) % PAGE_SIZE)
#define PAGE_OF(tile) 0
#endif
    uint4 k[2][KEY_LOADS], v[4][VALUE_LOADS];
#define LOAD_KEYS(tile, page) { \
        DECLARE_PAGE_BASE(tile, page) \
        _Pragma("unroll") for (int j = 0; j < 2; j++) { \
            const unsigned char* at = keys + (KV_SLOT(tile, j * 8 + group) * KV_HEADS + head) * KEY_BYTES; \
            _Pragma("unroll") for (int i = 0; i < KEY_LOADS; i++) \
                k[j][i] = load_kv(at + quarter * 16 + i * 64); \
        } \
    }
#define LOAD_VALUES(tile, page) { \
        DECLARE_PAGE_BASE(tile, page) \
        _Pragma("unroll") for (int j = 0; j < 4; j++) { \
            const int token = j / 2 * 8 + quarter * 2 + j % 2; \
            const unsigned char* at = values + (KV_SLOT(tile, token) * KV_HEADS + head) * KEY_BYTES + group * 16; \
            _Pragma("unroll") for (int i = 0; i < VALUE_LOADS; i++) v[j][i] = load_kv(at + i * 128); \
        } \
    }
    int page = PAGE_OF(tile), next_page = PAGE_OF(tile + step);
    if (tile < end) {
        LOAD_KEYS(tile, page)
        LOAD_VALUES(tile, page)
    }
#if SINKS
    __shared__ float sink_scores[GQA_GROUP];
    if (threadIdx.x < GQA_GROUP) sink_scores[threadIdx.x] = sinks[head * GQA_GROUP + threadIdx.x];
#endif
#if FUSED_QKV
    // PDL wait: outputs of earlier kernels of this step are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    unsigned queries[QUERY_PAIRS];
    const unsigned short* from = q + (size_t)row * stride + (head * GQA_GROUP + group) * HEAD_DIM;
#if FUSED_QKV
    cosines += row * (HEAD_DIM / 2), sines += row * (HEAD_DIM / 2);
#endif
    float x[KEY_LOADS][ELEMENTS];
    if (group < GQA_GROUP || FUSED_QKV) {
        if (group >= GQA_GROUP) from = q + (size_t)row * stride;  // any valid row: the result is not used
#if FUSED_QKV
        norm_rope_head(x, from, q_scales, cosines, sines, epsilon, quarter);
#else
        load_head(x, from, quarter);
#endif
    }
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
        for (int j = 0; j < ELEMENTS / 2; j++)
            queries[i * ELEMENTS / 2 + j] = group < GQA_GROUP ? pack_operand(x[i][2 * j], x[i][2 * j + 1]) : 0;

    // For heads quarter * 2 and quarter * 2 + 1: highest score, this lane's partial sum of the softmax weights, and
    // value sums of elements i * 8 * ELEMENTS + group * ELEMENTS + 0 to ELEMENTS - 1.
    float max_score_so_far[2] = {MIN_SCORE, MIN_SCORE}, weight_sum[2] = {0, 0};
    float sums[VALUE_LOADS][ELEMENTS / 2][4] = {};
#if FUSED_QKV
    if (split == splits - 1 && warp == WARPS - 1) {  // no warp has fewer tiles
        const unsigned short* raw = q + (size_t)row * stride + (KV_HEADS * GQA_GROUP + head) * HEAD_DIM;
        const size_t into = ((size_t)slot_mapping[row] * KV_HEADS + head) * KEY_BYTES;
        norm_rope_head(x, raw, k_scales, cosines, sines, epsilon, quarter);
        float newest = 0;
#pragma unroll
        for (int i = 0; i < KEY_LOADS; i++) {
            __align__(16) unsigned words[4];
#pragma unroll
            for (int j = 0; j < ELEMENTS / 2; j++) {
#if FP8
                const unsigned short both = pack_e4m3x2(x[i][2 * j], x[i][2 * j + 1]);
                words[j / 2] = j % 2 ? words[j / 2] | (unsigned)both << 16 : both;
                const unsigned rounded = e4m3x2_to_f16x2(both);
#else
                const unsigned rounded = words[j] = pack_operand(x[i][2 * j], x[i][2 * j + 1]);
#endif
                newest = fmaf(low_float(queries[i * ELEMENTS / 2 + j]), low_float(rounded), newest);
                newest = fmaf(high_float(queries[i * ELEMENTS / 2 + j]), high_float(rounded), newest);
            }
            if (group == 0)
                *(uint4*)(keys + into + (i * 4 + quarter) * 16) = *(uint4*)words;
        }
        newest += __shfl_xor_sync(0xffffffffu, newest, 1);
        newest += __shfl_xor_sync(0xffffffffu, newest, 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            max_score_so_far[i] = __shfl_sync(0xffffffffu, newest, (quarter * 2 + i) * 4) * scale;
            weight_sum[i] = group == 0;
        }
        raw += KV_HEADS * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; i++) {
            __align__(16) unsigned words[4];
#pragma unroll
            for (int j = 0; j < ELEMENTS / 2; j++) {
                const unsigned value_pair = *(const unsigned*)(raw + (i * 8 + group) * ELEMENTS + 2 * j);
#if FP8
                const unsigned short both = pack_e4m3x2(bf16_low(value_pair), bf16_high(value_pair));
                words[j / 2] = j % 2 ? words[j / 2] | (unsigned)both << 16 : both;
                const unsigned rounded = e4m3x2_to_f16x2(both);
#else
                const unsigned rounded = words[j] = value_pair;
#endif
                sums[i][j][0] = sums[i][j][1] = low_float(rounded);
                sums[i][j][2] = sums[i][j][3] = high_float(rounded);
            }
            if (quarter == 0)
                *(uint4*)(values + into + (i * 8 + group) * 16) = *(uint4*)words;
        }
    }
#endif

    for (; tile < end; tile += step) {
        const int next = tile + step, after_page = PAGE_OF(next + step);
        __align__(16) float s[4] = {};
#pragma unroll
        for (int i = 0; i < KEY_LOADS; i++) add_scores(s, k[0][i], k[1][i], queries + i * ELEMENTS / 2);
        if (next < end) LOAD_KEYS(next, next_page)
        const int token = tile * 16 + group;
        const bool upper = token >= begin && token < last, lower = token + 8 >= begin && token + 8 < last;
        const float negative_infinity = __int_as_float(0xff800000);
        float weights[2][2], shrink[2];
        bool higher = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = upper ? s[i] * scale : negative_infinity, b = lower ? s[2 + i] * scale : negative_infinity;
            float max_score = fmaxf(a, b);
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                max_score = fmaxf(max_score, __shfl_xor_sync(0xffffffffu, max_score, offset));
            max_score = fmaxf(max_score, max_score_so_far[i]);
            shrink[i] = exp2_approx(max_score_so_far[i] - max_score);
            higher |= max_score > max_score_so_far[i];
            max_score_so_far[i] = max_score;
            weights[0][i] = exp2_approx(a - max_score), weights[1][i] = exp2_approx(b - max_score);
            weight_sum[i] = fmaf(weight_sum[i], shrink[i], weights[0][i] + weights[1][i]);
        }
        if (__any_sync(0xffffffffu, higher)) {
#pragma unroll
            for (int i = 0; i < VALUE_LOADS; i++)
#pragma unroll
                for (int j = 0; j < ELEMENTS / 2; j++) {
                    sums[i][j][0] *= shrink[0], sums[i][j][1] *= shrink[1];
                    sums[i][j][2] *= shrink[0], sums[i][j][3] *= shrink[1];
                }
        }
#if PAGE_SIZE % 16 == 0
        // Slots of the page beyond the row's tokens hold data of other requests, possibly NaN, which a weight of
        // zero would not cancel: zero them.
        if (tile * 16 + 16 > last) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (tile * 16 + j / 2 * 8 + quarter * 2 + j % 2 >= last)
#pragma unroll
                    for (int i = 0; i < VALUE_LOADS; i++) v[j][i] = make_uint4(0, 0, 0, 0);
        }
#endif
        const unsigned p0 = transpose_fragment(pack_operand(weights[0][0], weights[0][1]));
        const unsigned p1 = transpose_fragment(pack_operand(weights[1][0], weights[1][1]));
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; i++) {
            add_values(sums[i] + 0 * ELEMENTS / 8, v[0][i].x, v[1][i].x, v[2][i].x, v[3][i].x, p0, p1);
            add_values(sums[i] + 1 * ELEMENTS / 8, v[0][i].y, v[1][i].y, v[2][i].y, v[3][i].y, p0, p1);
            add_values(sums[i] + 2 * ELEMENTS / 8, v[0][i].z, v[1][i].z, v[2][i].z, v[3][i].z, p0, p1);
            add_values(sums[i] + 3 * ELEMENTS / 8, v[0][i].w, v[1][i].w, v[2][i].w, v[3][i].w, p0, p1);
        }
        if (next < end) LOAD_VALUES(next, next_page)
        next_page = after_page;
    }

    // Merge the results of the block's warps.
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
            weight_sum[i] += __shfl_xor_sync(0xffffffffu, weight_sum[i], offset);
        const int query = quarter * 2 + i;
        if (query >= GQA_GROUP) continue;
        if (group == 0) max_scores[warp][query] = max_score_so_far[i], weight_sums[warp][query] = weight_sum[i];
#pragma unroll
        for (int piece = 0; piece < VALUE_LOADS; piece++)
#pragma unroll
            for (int j = 0; j < ELEMENTS / 2; j += 2)
                *(float4*)&merged[warp][query][(piece * 8 + group) * ELEMENTS + 2 * j] = make_float4(
                    sums[piece][j][i], sums[piece][j][2 + i],
                    sums[piece][j + 1][i], sums[piece][j + 1][2 + i]);
    }
    __syncthreads();
    const int pair = row * KV_HEADS + head;
#if PLANNED_SPLITS
    const int first_partial = item.w * KV_HEADS + head * most_splits;  // of this row and head
    const int counter = first_partial;
#else
    const int first_partial = pair * most_splits, counter = pair;
#endif
    // Threads work on four adjacent outputs, OUTPUTS of all of them.
#pragma unroll
    for (int output = threadIdx.x * 4; output < OUTPUTS; output += THREADS * 4) {
        const int query = output / HEAD_DIM;
        float max_score = MIN_SCORE, weight = 0;
        float4 sum = {};
#pragma unroll
        for (int i = 0; i < WARPS; i++) max_score = fmaxf(max_score, max_scores[i][query]);
#if SINKS
        if (splits == 1) add_sink(max_score, weight, sink_scores[query]);  // partial results have no share of it
#endif
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float share = exp2_approx(max_scores[i][query] - max_score);
            weight = fmaf(weight_sums[i][query], share, weight);
            add_scaled(sum, *(const float4*)&merged[i][query][output % HEAD_DIM], share);
        }
        if (splits == 1) {
            store_output(out + (size_t)pair * OUTPUTS + output, sum, weight);
            continue;
        }
        const int partial = first_partial + split;
        *(float4*)(partial_sums + (size_t)partial * OUTPUTS + output) = sum;
        if (output % HEAD_DIM == 0)
            *(float2*)(stats + (partial * GQA_GROUP + query) * 2) = make_float2(max_score, weight);
    }
    if (splits == 1) return;
    // The last block of this row and head to finish merges the partial results of all its splits.
    __shared__ bool is_last_block;
    __shared__ float2 all_stats[MAX_SPLITS][GQA_GROUP];
    __syncthreads();
    if (threadIdx.x == 0) {
        // After the barrier, it releases the stores of the whole block, and acquires those of the blocks before.
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counters + counter) : "memory");
        is_last_block = before == splits - 1;
    }
    __syncthreads();
    if (!is_last_block) return;
    if (threadIdx.x == 0) counters[counter] = 0;
    const float* from_partial = partial_sums + (size_t)first_partial * OUTPUTS;
    float4 loaded[MERGED_AT_ONCE];  // the first sums are in flight while the statistics are read
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; i++)
        if (i < splits && threadIdx.x * 4 < OUTPUTS)
            loaded[i] = __ldcg((const float4*)(from_partial + (size_t)i * OUTPUTS + threadIdx.x * 4));
    for (int i = threadIdx.x; i < splits * GQA_GROUP; i += THREADS)
        all_stats[i / GQA_GROUP][i % GQA_GROUP] = __ldcg((const float2*)stats + first_partial * GQA_GROUP + i);
    __syncthreads();
#pragma unroll
    for (int output = threadIdx.x * 4; output < OUTPUTS; output += THREADS * 4) {
        const int query = output / HEAD_DIM;
        float max_score = MIN_SCORE, weight = 0;
        float4 sum = {};
        for (int i = 0; i < splits; i++) max_score = fmaxf(max_score, all_stats[i][query].x);
#if SINKS
        add_sink(max_score, weight, sink_scores[query]);
#endif
        for (int begin = 0; begin < splits; begin += MERGED_AT_ONCE) {
            if (begin || output != threadIdx.x * 4)
#pragma unroll
                for (int i = 0; i < MERGED_AT_ONCE; i++)
                    if (begin + i < splits)
                        loaded[i] = __ldcg((const float4*)(from_partial + (size_t)(begin + i) * OUTPUTS + output));
#pragma unroll
            for (int i = 0; i < MERGED_AT_ONCE; i++)
                if (begin + i < splits) {
                    const float share = exp2_approx(all_stats[begin + i][query].x - max_score);
                    weight = fmaf(all_stats[begin + i][query].y, share, weight);
                    add_scaled(sum, loaded[i], share);
                }
        }
        store_output(out + (size_t)pair * OUTPUTS + output, sum, weight);
    }
}
