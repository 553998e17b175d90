// CUDA's threads as fibers of one thread of the host, so that kernels can be run and compared without a GPU.
// Blocks run one after another, or all together if they wait for each other; threads take turns wherever they wait.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <ucontext.h>
#include <vector>

#define EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define SHARED_BYTES(name) char* name = emulated::shared
#define SHARED_BYTES_AT(name, alignment) SHARED_BYTES(name)

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {
constexpr int STACK = 1 << 16;
struct Barrier {
  int alive = 0, arrived = 0;
  unsigned round = 0;
};
struct Warp {
  Barrier barrier;
  unsigned box[32], a[32][4], b[32][2];
  const char* rows[32];
};
// Copies into shared memory that a thread hasn't waited for yet, in batches that end at `ends`.
struct Copies {
  struct Copy { void* to; const void* from; };
  std::vector<Copy> copies;
  std::vector<size_t> ends;
  void make(size_t count) {
    for (size_t i = 0; i < count; ++i)
      if (copies[i].from) memcpy(copies[i].to, copies[i].from, 16);
      else memset(copies[i].to, 0, 16);
    copies.erase(copies.begin(), copies.begin() + count);
  }
};
struct Block {
  Index at;
  std::vector<ucontext_t> fibers;
  std::vector<char> done, shared;
  char* stacks = nullptr;  // not a vector: most of it is never touched
  size_t stack_bytes = 0;
  std::vector<Warp> warps;
  std::vector<Copies> copies;
  Barrier all, named[16];
  unsigned left, round;
};
static ucontext_t scheduler;
static Block* block;
static char* shared;
static unsigned current;
static void (*body)(void*);
static void* arguments;
static int down, late = -1, late_block = -1;  // see `take_turns`
static unsigned waiting;     // threads that only waited in this turn

// again: the thread has done nothing since it last came here
static void yield(bool again) {
  waiting += again;
  swapcontext(&block->fibers[current], &scheduler);
}
static void open_if_full(Barrier& b) {
  if (b.alive && b.arrived == b.alive) { b.arrived = 0; ++b.round; }
}
static void meet(Barrier& b) {
  const unsigned round = b.round;
  ++b.arrived;
  open_if_full(b);
  for (bool again = false; b.round == round; again = true) yield(again);
}
static Warp& warp() { return block->warps[threadIdx.x / 32]; }
static void enter() {
  body(arguments);
  block->done[current] = 1;
  --block->left;
  --block->all.alive; open_if_full(block->all);
  Barrier& w = block->warps[current / 32].barrier;
  --w.alive; open_if_full(w);
  yield(false);
}
static void begin(Block& b, unsigned threads) {
  b.fibers.resize(threads);
  if (b.stack_bytes < (size_t)threads * STACK) {
    free(b.stacks);
    b.stack_bytes = (size_t)threads * STACK;
    b.stacks = (char*)malloc(b.stack_bytes);
  }
  b.shared.assign(272 << 10, (char)0xff);
  b.done.assign(threads, 0);
  b.copies.assign(threads, Copies());
  b.warps.assign((threads + 31) / 32, Warp());
  b.all = Barrier();
  b.all.alive = b.left = threads;
  b.round = 0;
  for (Barrier& n : b.named) n = Barrier();
  for (unsigned t = 0; t < threads; ++t) {
    ++b.warps[t / 32].barrier.alive;
    getcontext(&b.fibers[t]);
    b.fibers[t].uc_stack.ss_sp = &b.stacks[(size_t)t * STACK];
    b.fibers[t].uc_stack.ss_size = STACK;
    b.fibers[t].uc_link = &scheduler;
    makecontext(&b.fibers[t], enter, 0);
  }
}
static char* shared_of(Block& b) { return b.shared.data() + (-(uintptr_t)b.shared.data() & 127); }
// Every thread of a block runs until it waits for another; those of a late warp rarely. Whether any did more than wait.
static bool turn(Block& b) {
  const bool has_late = late >= 0 && (late_block < 0 || late_block == (int)b.at.x);
  unsigned ran = 0;
  ++b.round;
  waiting = 0;
  block = &b;
  blockIdx = b.at;
  shared = shared_of(b);
  for (unsigned i = 0; i < b.done.size(); ++i) {
    const unsigned t = down ? b.done.size() - 1 - i : i;
    if (b.done[t]) continue;
    if (has_late && (int)t / 32 == late && b.round % 64) continue;
    current = t;
    threadIdx = {t, 0, 0};
    swapcontext(&scheduler, &b.fibers[t]);
    ++ran;
  }
  return waiting < ran;
}
static inline float bf16(unsigned half) {
  const unsigned bits = half << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
}  // namespace emulated

// Threads take turns from the first or (`down`) the last one on; warp `late` (-1: none) is slower than all others, in every
// block or (from 0 on) in one.
extern "C" void take_turns(int down, int late, int block) {
  emulated::down = down;
  emulated::late = late;
  emulated::late_block = block;
}

// Whether all blocks kept to so many bytes of shared memory. together: blocks wait for each other.
extern "C" int emulate(
    void (*body)(void*), void* arguments, unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned bytes,
    int together) {
  static std::vector<emulated::Block> blocks;
  emulated::body = body;
  emulated::arguments = arguments;
  gridDim = {gx, gy, gz};
  blockDim = {threads, 1, 1};
  const unsigned count = gx * gy * gz, side = together ? count : 1;
  if (blocks.size() < side) blocks.resize(side);
  for (unsigned n = 0; n < count; n += side) {
    unsigned left = 0;
    for (unsigned i = 0; i < side; ++i) {
      blocks[i].at = {(n + i) % gx, (n + i) / gx % gy, (n + i) / gx / gy};
      emulated::begin(blocks[i], threads);
      left += threads;
    }
    while (left) {
      left = 0;
      for (unsigned i = 0; i < side; ++i) {
        emulated::Block& block = blocks[emulated::down ? side - 1 - i : i];
        // a block that waits for others leaves its turn to them
        const int patience = emulated::late < 0 ? 8 : 128;
        for (int waits = 0; block.left && (waits < patience || !together);)
          waits = emulated::turn(block) ? 0 : waits + 1;
        left += block.left;
      }
    }
    for (unsigned b = 0; b < side; ++b)
      for (unsigned i = 0; i < 16 << 10; ++i)  // as `begin` filled it
        if (emulated::shared_of(blocks[b])[bytes + i] != (char)0xff) return 0;
  }
  return 1;
}

static inline void __syncthreads() { emulated::meet(emulated::block->all); }
static inline void meet(int id, int threads) {
  emulated::block->named[id].alive = threads;
  emulated::meet(emulated::block->named[id]);
}
static inline void __threadfence() {}
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int atomicAdd(int* p, int v) { int old = *p; *p += v; return old; }

template <class T> static inline T exchanged(T v, int from) {
  static_assert(sizeof(T) == 4, "words");
  emulated::Warp& w = emulated::warp();
  memcpy(&w.box[threadIdx.x % 32], &v, 4);
  emulated::meet(w.barrier);
  T out;
  memcpy(&out, &w.box[from], 4);
  emulated::meet(w.barrier);
  return out;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int o) { return exchanged(v, (threadIdx.x % 32) ^ o); }
template <class T> static inline T __shfl_sync(unsigned, T v, int from) { return exchanged(v, from); }

static inline void after_others() {}
static inline void let_others_start() {}
static inline void __syncwarp() { emulated::meet(emulated::warp().barrier); }
static inline int __float2int_rn(float f) { return (int)lrintf(f); }
// Copies are made when the thread that began them waits for them; until then no number lies there.
static inline emulated::Copies& copies() { return emulated::block->copies[emulated::current]; }
static inline void copy_ahead(void* to, const void* from, bool in) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) abort();
  memset(to, 0xff, 16);
  copies().copies.push_back({to, in ? from : nullptr});
}
static inline void copies_end() { copies().ends.push_back(copies().copies.size()); }
template <int N> static inline void copies_but() {
  emulated::Copies& c = copies();
  if (c.ends.size() <= N) return;
  const size_t through = c.ends.size() - N, made = c.ends[through - 1];
  c.make(made);
  c.ends.erase(c.ends.begin(), c.ends.begin() + through);
  for (size_t& end : c.ends) end -= made;
}
// bytes: arrivals still to come (two), how many there are in a phase (two), the phase
static inline void barrier_make(unsigned long long* b, int arrivals) {
  *b = (unsigned long long)arrivals << 16 | (unsigned)arrivals;
}
static inline void barriers_made() {}
static inline void barrier_arrive(unsigned long long* b) {
  if ((--*b & 0xffff) == 0) *b = ((*b >> 32) ^ 1) << 32 | (*b & 0xffff0000) | (*b >> 16 & 0xffff);
}
constexpr int FILLERS = 32;
static inline void barrier_copied(unsigned long long* b) {
  copies().make(copies().copies.size());
  copies().ends.clear();
  barrier_arrive(b);
}
static inline void barrier_wait(const unsigned long long* b, unsigned parity) {
  for (bool again = false; (unsigned)(*(const volatile unsigned long long*)b >> 32) == parity; again = true)
    emulated::yield(again);
}
template <int N> static inline void products_but() {}
template <int N> static inline void more_registers() {}
template <int N> static inline void fewer_registers() {}
static inline void load_matrices(unsigned* d, const char* rows, int c) {
  const int g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) memcpy(d + i, rows + g * 128 + ((c + i) ^ g) * 16 + j * 4, 4);
}
static inline void load_matrices_of(unsigned* d, const char* row, bool columns) {
  emulated::Warp& w = emulated::warp();
  const int lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  if ((uintptr_t)row % 16) abort();
  w.rows[lane] = row;
  emulated::meet(w.barrier);
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e) {
      const int r = columns ? 2 * j + e : g, c = columns ? g : 2 * j + e;
      memcpy((char*)(d + i) + 2 * e, w.rows[8 * i + r] + 2 * c, 2);
    }
  emulated::meet(w.barrier);
}
static inline void load_rows(unsigned* d, const char* row) { load_matrices_of(d, row, false); }
static inline void load_columns(unsigned* d, const char* row) { load_matrices_of(d, row, true); }
static inline unsigned transposed(unsigned words) {
  const int g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const unsigned near = exchanged(words, 8 * j + g / 2), far = exchanged(words, 8 * j + 4 + g / 2);
  return (near >> 16 * (g % 2) & 0xffff) | (far >> 16 * (g % 2) & 0xffff) << 16;
}
static inline float power(float x) { return expf(x); }
static inline float silu(float x) { return x / (1.f + expf(-x)); }
static inline unsigned less_eight(unsigned q) { return (q & 0xf0f0f0f0u) ^ 0x80808080u; }
static inline unsigned bytes_of(unsigned a, unsigned b, unsigned which) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
template <class T> static inline T from_host(const T* p) { return *(const volatile T*)p; }
static inline uint4 words_of(const uint4* p) { return *p; }
static inline void see_the_host() { __sync_synchronize(); }
static inline void show_the_host() { __sync_synchronize(); }
static inline long long clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
template <class T> static inline T from_others(const T* p) { return *p; }
static inline unsigned word_now(const unsigned* p) {
  emulated::yield(true);
  return *(const volatile unsigned*)p;
}
static inline void add_behind(unsigned* p, unsigned v) { *p += v; }
static inline int count_in(int* counter) { return (*counter)++; }

static inline float half_to_float(unsigned short h) {
  const unsigned sign = (h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 0x3ff;
  if (e == 31) return __uint_as_float(sign | 0x7f800000u | m << 13);
  const float v = e ? ldexpf((float)(m + 1024), (int)e - 25) : ldexpf((float)m, -24);
  return sign ? -v : v;
}
static inline unsigned rounded(float x) {
  const unsigned b = __float_as_uint(x);
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
static inline unsigned add_bf16x2(unsigned a, unsigned b) {
  return rounded(emulated::bf16(a & 0xffff) + emulated::bf16(b & 0xffff)) |
         rounded(emulated::bf16(a >> 16) + emulated::bf16(b >> 16)) << 16;
}
static inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  return rounded(fmaf(emulated::bf16(a & 0xffff), emulated::bf16(b & 0xffff), emulated::bf16(c & 0xffff))) |
         rounded(fmaf(emulated::bf16(a >> 16), emulated::bf16(b >> 16), emulated::bf16(c >> 16))) << 16;
}
static inline unsigned in_register(unsigned v) { return v; }
static inline unsigned pair_of(float a, float b) { return rounded(a) | rounded(b) << 16; }
// every lane's operands, where the others see them; the caller meets once more when it has read them
static inline emulated::Warp& exchanged(unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulated::Warp& w = emulated::warp();
  const int lane = threadIdx.x % 32;
  const unsigned mine[4] = {a0, a1, a2, a3};
  memcpy(w.a[lane], mine, 16);
  w.b[lane][0] = b0; w.b[lane][1] = b1;
  emulated::meet(w.barrier);
  return w;
}
static inline void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulated::Warp& w = exchanged(a0, a1, a2, a3, b0, b1);
  const int lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * j + i % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned a = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const unsigned b = w.b[column * 4 + k % 8 / 2][k / 8];
      d[i] += emulated::bf16(k % 2 ? a >> 16 : a & 0xffff) * emulated::bf16(k % 2 ? b >> 16 : b & 0xffff);
    }
  }
  emulated::meet(w.barrier);
}
static inline void mma_bytes(int* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, int c) {
  emulated::Warp& w = exchanged(a0, a1, a2, a3, b0, b1);
  const int lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * j + i % 2;
    d[i] = c;
    for (int k = 0; k < 32; ++k) {
      const unsigned a = w.a[row % 8 * 4 + k % 16 / 4][row / 8 + 2 * (k / 16)];
      const unsigned b = w.b[column * 4 + k % 16 / 4][k / 16];
      d[i] += (int)(signed char)(a >> 8 * (k % 4)) * (int)(signed char)(b >> 8 * (k % 4));
    }
  }
  emulated::meet(w.barrier);
}
