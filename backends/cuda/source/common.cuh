// What all kernels share. Every kernel takes one struct of 8-byte fields, in the order in which
// flashrt/backends/cuda/args.py packs them. Sizes that change from step to step are read from device memory
// (`const i64*`). A kernel may start before the one in front of it is through: until `after_others()`
// it may only read weights.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define INFINITE __int_as_float(0x7f800000)
#define LARGEST 3.402823466e38f

#ifndef EMULATED
#define SHARED_BYTES_AT(name, alignment) extern __shared__ __align__(alignment) char name[]
#define SHARED_BYTES(name) SHARED_BYTES_AT(name, 16)

__device__ __forceinline__ void after_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_others_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
// a + b of two pairs of bf16
__device__ __forceinline__ u32 add_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return d;
}
// a·b + c of two pairs of bf16 each, rounded once
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// A constant that keeps a register: the compiler, which would set one anew for each use, can't know that the grid's third
// size is 1.
__device__ __forceinline__ u32 in_register(u32 v) {
  u32 one;
  asm volatile("mov.u32 %0, %%nctaid.z;" : "=r"(one));
  return v * one;
}
// Two values as bf16, nearest, half to even: the first in the lower half.
__device__ __forceinline__ u32 pair_of(float a, float b) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
// d = c + a·b: a 16×32, b 32×8 of signed bytes, d 16×8
__device__ __forceinline__ void mma_bytes(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int c) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c));
}
// d += a·b: a 16×16, b 16×8 of bf16, d 16×8
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 16 bytes into shared memory, or zeros, while the thread goes on: `copies_end` closes a batch of such copies,
// and behind `copies_but<N>` all but the last N batches of this thread are there.
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool in) {
  const u32 there = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(there), "l"(from), "r"(in ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copies_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// A barrier in shared memory that opens when so many have arrived and the bytes are there that were announced: phase
// after phase, whose parity is asked for.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_make(u64* b, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// Before copies may count on barriers that were made.
__device__ __forceinline__ void barriers_made() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(const u64* b, u32 parity) {
  u32 open;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(open) : "r"(shared_address(b)), "r"(parity) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(open) : "r"(shared_address(b)), "r"(parity) : "memory");
#endif
  } while (!open);
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(shared_address(b)) : "memory");
}
#if __CUDA_ARCH__ >= 900
constexpr int FILLERS = 1;  // arrivals that a piece of copies makes
__device__ __forceinline__ void barrier_expect(u64* b, int bytes) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;\n}"
               ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Copies whole 16 bytes into shared memory, for a barrier that expects them; one thread calls it.
__device__ __forceinline__ void bulk_ahead(void* to, const void* from, int bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
#define BULK 1
#else
constexpr int FILLERS = 32;
#endif
// A lane arrives when the copies that it began are there.
__device__ __forceinline__ void barrier_copied(u64* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
// Four words of a lane: word j of row g of chunks c…c+3, where a row has 128 bytes and chunk i of row r lies at i ^ r.
__device__ __forceinline__ void load_matrices(u32* d, const char* rows, int c) {
  const u32 lane = threadIdx.x & 31, row = lane & 7;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(rows) + row * 128 + (((lane >> 3) + c ^ row) << 4)) : "memory");
}
// Of four 8×8 matrices of 2-byte elements: words of a lane as operands of `mma`, elements 2·(lane % 4) and the next one of
// row lane / 4, or of the same column. row: lane l's is row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void load_rows(u32* d, const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_columns(u32* d, const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}
// Words of rows of an 8×8 matrix, as `mma` gives them: those of its columns.
__device__ __forceinline__ u32 transposed(u32 words) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(words));
  return d;
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void products_but() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
#define SUMS_8(d) \
  "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3]), "+f"((d)[4]), "+f"((d)[5]), "+f"((d)[6]), "+f"((d)[7])
// Rows in shared memory as tensor cores are told of them; the same for all threads of a warp, and known to be. 16 bytes
// further it is 1 more.
typedef u64 SharedRows;
__device__ __forceinline__ SharedRows shared_rows(const char* at, int chunk) {
  // 8 rows of 128 bytes are 1024 bytes apart from the next ones; chunks are swizzled
  const u32 there = __shfl_sync(0xffffffffu, (shared_address(at) >> 4) + chunk & 0x3fff, 0);
  return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | there;
}
// d += a·b for the 64 rows of four warps, 16 inputs and 8·NT tokens: b is laid out as `load_matrices` takes it.
template <int NT>
__device__ __forceinline__ void wgmma(float* d, const u32* a, SharedRows rows) {
  if constexpr (NT == 2)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : SUMS_8(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  else if constexpr (NT == 4)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : SUMS_8(d), SUMS_8(d + 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  else if constexpr (NT == 8)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : SUMS_8(d), SUMS_8(d + 8), SUMS_8(d + 16), SUMS_8(d + 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : SUMS_8(d), SUMS_8(d + 8), SUMS_8(d + 16), SUMS_8(d + 24), SUMS_8(d + 32), SUMS_8(d + 40), SUMS_8(d + 48), SUMS_8(d + 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
#undef SUMS_8
// How many registers the threads of four warps have from now on.
template <int N>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
#else
template <int N>
__device__ __forceinline__ void products_but() {}
template <int N>
__device__ __forceinline__ void more_registers() {}
template <int N>
__device__ __forceinline__ void fewer_registers() {}
#endif
// Threads that share a barrier of the block: number `id`, `threads` of them.
__device__ __forceinline__ void meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// e^x, to some units in the last place where x is small, as differences of maxima are
__device__ __forceinline__ float power(float x) { return __expf(x); }
// x / (1 + e^-x), likewise
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
// The upper halves of four bytes, from 0 to 15, as 16·(q − 8): signed bytes.
__device__ __forceinline__ u32 less_eight(u32 q) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(q), "r"(0xf0f0f0f0u), "r"(0x80808080u));
  return d;
}
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
// What `pull` brought, read before `after_others`; what other blocks of this kernel wrote.
template <class T>
__device__ __forceinline__ T from_host(const T* p) { return *(const volatile T*)p; }
template <class T>
__device__ __forceinline__ T from_others(const T* p) { return __ldcg(p); }
// Words that others write while this kernel runs, as they are now.
__device__ __forceinline__ uint4 words_of(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// What the host wrote before a word that was just read is read from now on; what was written here is there for the
// host before any word that is written next.
__device__ __forceinline__ void see_the_host() { __threadfence_system(); }
__device__ __forceinline__ void show_the_host() { __threadfence_system(); }
__device__ __forceinline__ i64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return (i64)t;
}
// A word that other blocks change, as it is now; what they wrote before it is seen from then on.
__device__ __forceinline__ u32 word_now(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Adds to such a word, behind what this thread wrote or knows to be written.
__device__ __forceinline__ void add_behind(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// How many counted in before. What a block wrote before it met and one of its threads counted in is there for
// those that count in later.
__device__ __forceinline__ int count_in(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
#endif

// nearest, half to even; NaN stays NaN
__device__ __forceinline__ u32 bf16_of(float x) {
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
__device__ __forceinline__ float float_of(u32 bf16) { return __uint_as_float(bf16 << 16); }

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// The sum over the first 512 threads of a block, for all of them; `room` has 16 floats. One order for every caller.
__device__ __forceinline__ float block_sum(float v, float* room) {
  v = warp_sum(v);
  meet(0, 512);
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  meet(0, 512);
  v = room[threadIdx.x & 15];
  for (int o = 8; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// 1 / root mean square, by a block of 512 threads: `sum` is a thread's Σx² of its pieces of 8, one by one, where
// piece p belongs to thread p % 512
__device__ __forceinline__ float inverse_rms(float sum, int width, float eps, float* room) {
  return __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(block_sum(sum, room), (float)width), eps)));
}

__device__ __forceinline__ float activated(float x, int act) {
  switch (act) {
    case 1: return __fdiv_rn(x, 1.f + expf(-x));                                                // silu
    case 2: return x * (1.f + erff(x * 0.70710678118654752f)) * 0.5f;                           // gelu
    case 3: return x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))) * 0.5f;  // gelu_tanh
    case 4: return fmaxf(x, 0.f);                                                               // relu
    case 5: return tanhf(x);
    case 6: return __fdiv_rn(1.f, 1.f + expf(-x));                                              // sigmoid
  }
  return x;
}

__device__ __forceinline__ void put_as(float* y, i64 at, float v, i64 bf16) {
  if (bf16) ((u16*)y)[at] = (u16)bf16_of(v);
  else y[at] = v;
}

// Where two neighbouring channels of a token lie, in elements, among bf16 activations in tiles, as source/gemm.cu copies
// them: in pieces of 64 channels, in each of which a token has 128 bytes, `rows` tokens. 16-byte chunk c of token t is at
// c ^ t % 8 there, as tensor cores take it. A chunk has two channels of each of the four lanes that share a row of weights,
// in the order in which `unpack_rows` has them: for the first product of a block chunks 0 and 1, for the second one 2 and 3.
__device__ __forceinline__ i64 in_tiles(i64 token, i64 channel, i64 rows, i64 format) {
  const int pair = (int)channel >> 1 & 31;
  const int chunk = format == 8 ? (pair >> 2 & 6) | (pair & 1) : (pair >> 2 & 4) | (pair & 3);
  const int of = format == 8 ? pair >> 1 & 3 : pair >> 2 & 3;
  return ((channel >> 6) * rows + token) * 64 + ((chunk ^ (int)(token & 7)) << 3) + of * 2;
}

// N neighbouring channels of a token, from a multiple of N on, of which there are `some`; at once where memory allows it.
template <int N>
__device__ __forceinline__ void load_some(const float* x, int some, float* v) {
  if (some == N && ((u64)x & 15) == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *(const float4*)(x + i);
      v[i] = four.x; v[i + 1] = four.y; v[i + 2] = four.z; v[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i < some ? x[i] : 0.f;
  }
}

// as: 0: f32, 1: bf16; else bf16 in tiles for weights of this format, stride: tokens of a piece.
template <int N>
__device__ __forceinline__ void put_some(
    float* y, i64 token, i64 channel, i64 stride, i64 as, int some, const float* v) {
  if (as > 1) {
#pragma unroll
    for (int i = 0; i < N; i += 2)
      *(u32*)((u16*)y + in_tiles(token, channel + i, stride, as)) = pair_of(v[i], v[i + 1]);
    return;
  }
  const i64 at = token * stride + channel;
  if (as) {
    u16* to = (u16*)y + at;
    if (some == N && ((u64)to & 7) == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 4) *(uint2*)(to + i) = make_uint2(pair_of(v[i], v[i + 1]), pair_of(v[i + 2], v[i + 3]));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) if (i < some) to[i] = (u16)bf16_of(v[i]);
    }
  } else if (some == N && ((u64)(y + at) & 15) == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = {v[i], v[i + 1], v[i + 2], v[i + 3]};
      *(float4*)(y + at + i) = four;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) if (i < some) y[at + i] = v[i];
  }
}

__device__ __forceinline__ i64 place_of(i64 token, i64 channel, i64 stride, i64 as) {
  return as > 1 ? in_tiles(token, channel & ~1ll, stride, as) + (channel & 1) : token * stride + channel;
}

__device__ __forceinline__ void put_one(float* y, i64 token, i64 channel, i64 stride, i64 as, float v) {
  put_as(y, place_of(token, channel, stride, as), v, as);
}

__device__ __forceinline__ float element(const char* p, i64 i, int format) {
  if (format == 0) return ((const float*)p)[i];
  const u16 h = ((const u16*)p)[i];
  return format == 1 ? half_to_float(h) : float_of(h);
}

__device__ __forceinline__ void better(float& v, int& at, float other, int where) {
  if (other > v || (other == v && where < at)) { v = other; at = where; }
}

__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
