#if FP8
#define EACH 16  // numbers in 16 bytes of the cache
#define TYPE "f16"
#else
#define EACH 8
#define TYPE "bf16"
#endif
#define CHUNKS (SIZE / (4 * EACH))  // 16-byte pieces of a token's keys that a lane holds
#define PIECES (SIZE / (8 * EACH))  // the same of its values
#define PAIRS (SIZE / 8)            // pairs of numbers of a query that a lane holds
#define BYTES (SIZE * 16 / EACH)    // of a token's keys
#define THREADS (WARPS * 32)
#define NONE -1.0e30f

__device__ __forceinline__ float low16(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high16(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ unsigned pack16(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#if FP8
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float half_at(unsigned short x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    return value;
}
__device__ __forceinline__ float low(unsigned x) { return half_at((unsigned short)x); }
__device__ __forceinline__ float high(unsigned x) { return half_at((unsigned short)(x >> 16)); }
__device__ __forceinline__ unsigned short narrow(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ unsigned widen(unsigned short both) {
    unsigned wide;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(both));
    return wide;
}
__device__ __forceinline__ unsigned first(unsigned four) { return widen((unsigned short)four); }
__device__ __forceinline__ unsigned second(unsigned four) { return widen((unsigned short)(four >> 16)); }
#else
__device__ __forceinline__ unsigned pack(float low, float high) { return pack16(low, high); }
__device__ __forceinline__ float low(unsigned x) { return low16(x); }
__device__ __forceinline__ float high(unsigned x) { return high16(x); }
#endif

// Not through the read-only path, and volatile: the compiler may not move it behind the wait.
__device__ __forceinline__ uint4 cached_at(const unsigned char* at) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Scores of 16 tokens from a piece of their keys: `a` of tokens 0 to 7, `b` of 8 to 15.
__device__ __forceinline__ void score(float* s, uint4 a, uint4 b, const unsigned* q) {
#if FP8
    const unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        mma(s, first(x[i]), first(y[i]), second(x[i]), second(y[i]), q[2 * i], q[2 * i + 1]);
#else
    mma(s, a.x, b.x, a.y, b.y, q[0], q[1]);
    mma(s, a.z, b.z, a.w, b.w, q[2], q[3]);
#endif
}
// Adds values (a word each of the lane's four tokens) times probabilities to the sums.
__device__ __forceinline__ void add(
    float (*sums)[4], unsigned a, unsigned b, unsigned c, unsigned d, unsigned p0, unsigned p1) {
#if FP8
    const unsigned x = __byte_perm(a, b, 0x5140), y = __byte_perm(c, d, 0x5140);
    mma(sums[0], first(x), second(x), first(y), second(y), p0, p1);
    const unsigned z = __byte_perm(a, b, 0x7362), w = __byte_perm(c, d, 0x7362);
    mma(sums[1], first(z), second(z), first(w), second(w), p0, p1);
#else
    mma(sums[0], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
        __byte_perm(c, d, 0x7632), p0, p1);
#endif
}

// Loads a lane's part of a head: numbers i * 4 * EACH + quarter * EACH + 0 to EACH - 1.
__device__ __forceinline__ void load(float (*x)[EACH], const unsigned short* from, int quarter) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int j = 0; j < EACH; j += 8) {
            const uint4 raw = *(const uint4*)(from + (i * 4 + quarter) * EACH + j);
            const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[i][j + 2 * k] = low16(words[k]), x[i][j + 2 * k + 1] = high16(words[k]);
        }
}
// Loads a lane's part of a head, normalises and rotates it.
__device__ __forceinline__ void prepare(
    float (*x)[EACH], const unsigned short* from, const unsigned short* scales, const float* cosines,
    const float* sines, float epsilon, int quarter) {
    load(x, from, quarter);
#if NORM
    float squares = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) squares = fmaf(x[i][j], x[i][j], squares);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    const float by = rsqrtf(squares / SIZE + epsilon);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int j = 0; j < EACH; j += 8) {
            const uint4 raw = *(const uint4*)(scales + (i * 4 + quarter) * EACH + j);
            const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[i][j + 2 * k] *= by * low16(words[k]), x[i][j + 2 * k + 1] *= by * high16(words[k]);
        }
#endif
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++)
#pragma unroll
        for (int j = 0; j < EACH; j += 4) {
            const float4 c = *(const float4*)(cosines + (i * 4 + quarter) * EACH + j);
            const float4 s = *(const float4*)(sines + (i * 4 + quarter) * EACH + j);
            const float cs[4] = {c.x, c.y, c.z, c.w}, ss[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float left = x[i][j + k], right = x[i + CHUNKS / 2][j + k];
                x[i][j + k] = left * cs[k] - right * ss[k];
                x[i + CHUNKS / 2][j + k] = right * cs[k] + left * ss[k];
            }
        }
}

// q: raw projections [rows, stride], of which the first KV * GROUP heads are queries, then keys, then values;
// or (without PROJECTED) ready queries. out: [rows, KV * GROUP, SIZE].
// The grid is (splits, KV, rows), or with UNEVEN (KV, items), where an item says which part of which row it is,
// of how many, and which partial result is the row's first; see uneven.py.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
paged(const unsigned short* q, const unsigned short* q_scales, const unsigned short* k_scales,
    const float* cosines, const float* sines, const long long* cells, const int* slots, const int* lengths,
    const int* table, unsigned char* keys, unsigned char* values, unsigned short* out,
    float* parts, float* stats, int* counters, int columns, int stride,
#if UNEVEN
    const int4* items,
#else
    int splits,
#endif
    float epsilon, float scale) {
    __shared__ __align__(16) float merged[WARPS][GROUP][SIZE];
    __shared__ float tops[WARPS][GROUP], totals[WARPS][GROUP];
    asm volatile("griddepcontrol.launch_dependents;");
#if !PROJECTED
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the kernel ahead stored the newest keys and values
#endif
#if UNEVEN
    const int head = blockIdx.x;
    const int4 item = __ldcg(items + blockIdx.y);
    const int row = item.x, split = item.y, splits = item.z;
    if (row < 0) return;
#else
    const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int length = lengths[row];
    const int* pages = table + (size_t)slots[row] * columns;
    const int last = length - PROJECTED;  // the newest token is at hand where projections are
    const int begin = WINDOW && length > WINDOW ? length - WINDOW : 0;
    const int end = (last + 15) / 16, step = splits * WARPS;
    int turn = begin / 16 + split * WARPS + warp;  // which 16 tokens

    // Where tokens `turn * 16 + i` lie, in rows of the cache.
#if PAGE % 16 == 0
#define PLACES(turn, page) const size_t place = (size_t)(page) * PAGE + (turn) * 16 % PAGE;
#define PLACE(turn, i) (place + (i))
#define PAGE_OF(turn) ((turn) < end ? pages[(turn) * 16 / PAGE] : 0)
#else
#define PLACES(turn, page)
#define TOKEN(turn, i) min((turn) * 16 + (i), last - 1)
#define PLACE(turn, i) ((size_t)pages[TOKEN(turn, i) / PAGE] * PAGE + TOKEN(turn, i) % PAGE)
#define PAGE_OF(turn) 0
#endif
    uint4 k[2][CHUNKS], v[4][PIECES];
#define LOAD_KEYS(turn, page) { \
        PLACES(turn, page) \
        _Pragma("unroll") for (int j = 0; j < 2; j++) { \
            const unsigned char* at = keys + (PLACE(turn, j * 8 + group) * KV + head) * BYTES; \
            _Pragma("unroll") for (int i = 0; i < CHUNKS; i++) \
                k[j][i] = cached_at(at + quarter * 16 + i * 64); \
        } \
    }
#define LOAD_VALUES(turn, page) { \
        PLACES(turn, page) \
        _Pragma("unroll") for (int j = 0; j < 4; j++) { \
            const int token = j / 2 * 8 + quarter * 2 + j % 2; \
            const unsigned char* at = values + (PLACE(turn, token) * KV + head) * BYTES + group * 16; \
            _Pragma("unroll") for (int i = 0; i < PIECES; i++) v[j][i] = cached_at(at + i * 128); \
        } \
    }
    int page = PAGE_OF(turn), next_page = PAGE_OF(turn + step);
    if (turn < end) {
        LOAD_KEYS(turn, page)
        LOAD_VALUES(turn, page)
    }
#if PROJECTED
    // Nothing that an earlier kernel of this step writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    unsigned queries[PAIRS];
    const unsigned short* from = q + (size_t)row * stride + (head * GROUP + group) * SIZE;
#if PROJECTED
    cosines += row * (SIZE / 2), sines += row * (SIZE / 2);
#endif
    float x[CHUNKS][EACH];
    if (group < GROUP || PROJECTED) {
        if (group >= GROUP) from = q + (size_t)row * stride;  // any: it is not used
#if PROJECTED
        prepare(x, from, q_scales, cosines, sines, epsilon, quarter);
#else
        load(x, from, quarter);
#endif
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int j = 0; j < EACH / 2; j++)
            queries[i * EACH / 2 + j] = group < GROUP ? pack(x[i][2 * j], x[i][2 * j + 1]) : 0;

    // Of heads quarter * 2 and quarter * 2 + 1: highest score, this lane's share of the weights, and sums of
    // values at numbers piece * 8 * EACH + group * EACH + 0 to EACH - 1.
    float top[2] = {NONE, NONE}, total[2] = {0, 0};
    float sums[PIECES][EACH / 2][4] = {};
#if PROJECTED
    if (split == 0 && warp == 0) {
        const unsigned short* raw = q + (size_t)row * stride + (KV * GROUP + head) * SIZE;
        const size_t into = ((size_t)cells[row] * KV + head) * BYTES;
        prepare(x, raw, k_scales, cosines, sines, epsilon, quarter);
        float newest = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            __align__(16) unsigned words[4];
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) {
#if FP8
                const unsigned short both = narrow(x[i][2 * j], x[i][2 * j + 1]);
                words[j / 2] = j % 2 ? words[j / 2] | (unsigned)both << 16 : both;
                const unsigned kept = widen(both);
#else
                const unsigned kept = words[j] = pack(x[i][2 * j], x[i][2 * j + 1]);
#endif
                newest = fmaf(low(queries[i * EACH / 2 + j]), low(kept), newest);
                newest = fmaf(high(queries[i * EACH / 2 + j]), high(kept), newest);
            }
            if (group == 0)
                *(uint4*)(keys + into + (i * 4 + quarter) * 16) = *(uint4*)words;
        }
        newest += __shfl_xor_sync(0xffffffffu, newest, 1);
        newest += __shfl_xor_sync(0xffffffffu, newest, 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[i] = __shfl_sync(0xffffffffu, newest, (quarter * 2 + i) * 4) * scale;
            total[i] = group == 0;
        }
        raw += KV * SIZE;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            __align__(16) unsigned words[4];
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) {
                const unsigned two = *(const unsigned*)(raw + (i * 8 + group) * EACH + 2 * j);
#if FP8
                const unsigned short both = narrow(low16(two), high16(two));
                words[j / 2] = j % 2 ? words[j / 2] | (unsigned)both << 16 : both;
                const unsigned kept = widen(both);
#else
                const unsigned kept = words[j] = two;
#endif
                sums[i][j][0] = sums[i][j][1] = low(kept);
                sums[i][j][2] = sums[i][j][3] = high(kept);
            }
            if (quarter == 0)
                *(uint4*)(values + into + (i * 8 + group) * 16) = *(uint4*)words;
        }
    }
#endif

    for (; turn < end; turn += step) {
        const int next = turn + step, after_page = PAGE_OF(next + step);
        __align__(16) float s[4] = {};
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) score(s, k[0][i], k[1][i], queries + i * EACH / 2);
        if (next < end) LOAD_KEYS(next, next_page)
        const int token = turn * 16 + group;
        const bool upper = token >= begin && token < last, lower = token + 8 >= begin && token + 8 < last;
        const float none = __int_as_float(0xff800000);
        float weights[2][2], shrink[2];
        bool higher = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = upper ? s[i] * scale : none, b = lower ? s[2 + i] * scale : none;
            float most = fmaxf(a, b);
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
            most = fmaxf(most, top[i]);
            shrink[i] = power(top[i] - most);
            higher |= most > top[i];
            top[i] = most;
            weights[0][i] = power(a - most), weights[1][i] = power(b - most);
            total[i] = fmaf(total[i], shrink[i], weights[0][i] + weights[1][i]);
        }
        if (__any_sync(0xffffffffu, higher)) {
#pragma unroll
            for (int i = 0; i < PIECES; i++)
#pragma unroll
                for (int j = 0; j < EACH / 2; j++) {
                    sums[i][j][0] *= shrink[0], sums[i][j][1] *= shrink[1];
                    sums[i][j][2] *= shrink[0], sums[i][j][3] *= shrink[1];
                }
        }
#if PAGE % 16 == 0
        // What lies in a page beyond the row's tokens is another request's, and may be no number: nothing
        // times a weight of zero is zero then.
        if (turn * 16 + 16 > last) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (turn * 16 + j / 2 * 8 + quarter * 2 + j % 2 >= last)
#pragma unroll
                    for (int i = 0; i < PIECES; i++) v[j][i] = make_uint4(0, 0, 0, 0);
        }
#endif
        const unsigned p0 = transposed(pack(weights[0][0], weights[0][1]));
        const unsigned p1 = transposed(pack(weights[1][0], weights[1][1]));
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            add(sums[i] + 0 * EACH / 8, v[0][i].x, v[1][i].x, v[2][i].x, v[3][i].x, p0, p1);
            add(sums[i] + 1 * EACH / 8, v[0][i].y, v[1][i].y, v[2][i].y, v[3][i].y, p0, p1);
            add(sums[i] + 2 * EACH / 8, v[0][i].z, v[1][i].z, v[2][i].z, v[3][i].z, p0, p1);
            add(sums[i] + 3 * EACH / 8, v[0][i].w, v[1][i].w, v[2][i].w, v[3][i].w, p0, p1);
        }
        if (next < end) LOAD_VALUES(next, next_page)
        next_page = after_page;
    }

    // Merge the block's warps.
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], offset);
        const int query = quarter * 2 + i;
        if (query >= GROUP) continue;
        if (group == 0) tops[warp][query] = top[i], totals[warp][query] = total[i];
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
            for (int j = 0; j < EACH / 2; j += 2)
                *(float4*)&merged[warp][query][(piece * 8 + group) * EACH + 2 * j] = make_float4(
                    sums[piece][j][i], sums[piece][j][2 + i],
                    sums[piece][j + 1][i], sums[piece][j + 1][2 + i]);
    }
    __syncthreads();
    const int pair = row * KV + head;
#if UNEVEN
    const int base = item.w * KV + head * splits;  // of the partial results of this row and head
#define FIRST base
#define COUNTER base
#else
#define FIRST pair * splits
#define COUNTER pair
#endif
#pragma unroll
    for (int place = threadIdx.x; place < GROUP * SIZE; place += THREADS) {
        const int query = place / SIZE;
        float most = NONE, weight = 0, sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) most = fmaxf(most, tops[i][query]);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float share = power(tops[i][query] - most);
            weight = fmaf(totals[i][query], share, weight);
            sum = fmaf(merged[i][query][place % SIZE], share, sum);
        }
        if (splits == 1) {
            out[(size_t)pair * GROUP * SIZE + place] = (unsigned short)pack16(sum / weight, 0.0f);
            continue;
        }
        const int part = FIRST + split;
        parts[(size_t)part * GROUP * SIZE + place] = sum;
        if (place % SIZE == 0) {
            stats[(part * GROUP + query) * 2] = most;
            stats[(part * GROUP + query) * 2 + 1] = weight;
        }
    }
    if (splits == 1) return;
    // The last block of this row and head merges what all of them left.
    __shared__ bool ends;
    __shared__ float all_tops[MOST][GROUP], all_totals[MOST][GROUP];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ends = atomicAdd(counters + COUNTER, 1) == splits - 1;
    __syncthreads();
    if (!ends) return;
    __threadfence();
    if (threadIdx.x == 0) counters[COUNTER] = 0;
    for (int i = threadIdx.x; i < splits * GROUP; i += THREADS) {
        all_tops[i / GROUP][i % GROUP] = __ldcg(stats + (FIRST * GROUP + i) * 2);
        all_totals[i / GROUP][i % GROUP] = __ldcg(stats + (FIRST * GROUP + i) * 2 + 1);
    }
    __syncthreads();
    for (int place = threadIdx.x; place < GROUP * SIZE; place += THREADS) {
        const int query = place / SIZE;
        float most = NONE, weight = 0, sum = 0;
        for (int i = 0; i < splits; i++) most = fmaxf(most, all_tops[i][query]);
        for (int begin = 0; begin < splits; begin += 8) {
            float left[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (begin + i < splits)
                    left[i] = __ldcg(parts + (size_t)(FIRST + begin + i) * GROUP * SIZE + place);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (begin + i < splits) {
                    const float share = power(all_tops[begin + i][query] - most);
                    weight = fmaf(all_totals[begin + i][query], share, weight);
                    sum = fmaf(left[i], share, sum);
                }
        }
        out[(size_t)pair * GROUP * SIZE + place] = (unsigned short)pack16(sum / weight, 0.0f);
    }
}
