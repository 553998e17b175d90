// Everything that isn't a matrix product or attention.

// Inputs of the step from the host's pinned memory: pairs of addresses and sizes in bytes.
constexpr int ENTRIES = 64;  // of the list that a block looks at together
struct PullArgs {
  const i64* entries;  // [count][3]: from, to, bytes
  i64 count;
  i64* stamp;          // of the host's: when it began, by the device's clock
  const i64* epoch;    // among what it brings
  int* through;        // 0 before and after
  i64* pulled;         // a word of the host's that gets the epoch at the end
};

// It lets no kernel start before it is through: those behind it may read the inputs at once. When the host sees
// `pulled`, it may write the next step's. Each read of the host's memory takes some hundred nanoseconds of the link,
// whatever it brings: a warp's is 128 bytes, and a block reads the list once.
extern "C" __global__ void pull(PullArgs a) {
  __shared__ i64 list[3 * ENTRIES];
  after_others();
  const int thread = threadIdx.x, warps = blockDim.x / 32, count = (int)a.count;
  if (thread == 0 && blockIdx.x == 0) *a.stamp = clock_ns();
  for (int begin = 0; begin < count; begin += ENTRIES) {
    const int some = count - begin < ENTRIES ? count - begin : ENTRIES;
    if (begin) __syncthreads();
    for (int i = thread; i < 3 * some; i += blockDim.x) list[i] = from_host(a.entries + 3 * begin + i);
    __syncthreads();
    for (int part = blockIdx.x * warps + thread / 32, before = 0, e = 0; e < some;) {
      const i64* entry = list + 3 * e;
      const int words = (int)entry[2] / 4, parts = (words + 31) / 32;
      if (part - before >= parts) { before += parts; ++e; continue; }
      const int i = (part - before) * 32 + thread % 32;
      if (i < words) ((u32*)entry[1])[i] = from_host((const u32*)entry[0] + i);
      part += gridDim.x * warps;
    }
  }
  __threadfence();
  __syncthreads();
  if (thread || atomicAdd(a.through, 1) != (int)gridDim.x - 1) return;
  *a.through = 0;
  show_the_host();
  *(volatile i64*)a.pulled = from_others(a.epoch);
}

// A result of the step: to the host, where two places take turns, so that the step behind may run before the host has
// read this one's, and to where that step's inputs may come from.
struct PushArgs {
  const u32* from;
  u32* to;           // [2][apart], of the host's
  i64 apart;
  u32* kept;
  i64 words;
  const i64* epoch;
};

extern "C" __global__ void push(PushArgs a) {
  after_others();
  u32* to = a.to + (*a.epoch & 1) * a.apart;
  for (i64 i = threadIdx.x; i < a.words; i += blockDim.x) {
    const u32 v = a.from[i];
    to[i] = v;
    a.kept[i] = v;
  }
}

struct NormArgs {
  const float* x;
  i64 x_stride;
  const float* w;     // 0: none
  const float* b;
  float* y;
  i64 y_stride, y_as, groups, width, w_size;  // as: see `put_some`
  double eps, offset;
  i64 layer;          // layer_norm
  const i64* rows;
};

extern "C" __global__ void __launch_bounds__(512) normalise(NormArgs a) {
  __shared__ float room[16];
  let_others_start();
  after_others();
  const i64 row = blockIdx.x, group = blockIdx.y;
  if (row >= *a.rows) return;
  const float* x = a.x + row * a.x_stride + group * a.width;
  const int width = (int)a.width;
  float mean = 0.f, inverse;
  if (a.layer) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < width; i += 512) sum += x[i];
    mean = __fdiv_rn(block_sum(sum, room), (float)width);
    sum = 0.f;
    for (int i = threadIdx.x; i < width; i += 512) sum = __fmaf_rn(x[i] - mean, x[i] - mean, sum);
    inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(block_sum(sum, room), (float)width), (float)a.eps)));
  } else {
    float sum = 0.f;
    for (int p = threadIdx.x * 8; p < width; p += 4096) {
      float v[8];
      load_some<8>(x + p, width - p < 8 ? width - p : 8, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    }
    inverse = inverse_rms(sum, width, (float)a.eps, room);
  }
  for (int p = threadIdx.x * 8; p < width; p += 4096) {
    const i64 channel = group * a.width + p;
    const int some = width - p < 8 ? width - p : 8;
    const bool one = !a.w || channel % a.w_size + some <= a.w_size;  // the weights' row doesn't begin anew in this piece
    float v[8], by[8], more[8];
    load_some<8>(x + p, some, v);
    if (a.w && one) load_some<8>(a.w + channel % a.w_size, some, by);
    if (a.b) load_some<8>(a.b + channel, some, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = __fmul_rn(v[i] - mean, inverse);
      if (a.w) v[i] = __fmul_rn(v[i], __fadd_rn((float)a.offset, one ? by[i] : a.w[(channel + i) % a.w_size]));
      if (a.b) v[i] = __fadd_rn(v[i], more[i]);
    }
    put_some<8>(a.y, row, channel, a.y_stride, a.y_as, some, v);
  }
}

struct RopeTableArgs {
  const void* positions;
  i64 wide;
  const float* frequencies;
  float* y;
  i64 y_stride, half;
  double scale;
  const i64* rows;
};

extern "C" __global__ void rope_table(RopeTableArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.x;
  if (row >= *a.rows) return;
  const float p = a.wide ? (float)((const i64*)a.positions)[row] : (float)((const int*)a.positions)[row];
  for (i64 i = threadIdx.x; i < a.half; i += blockDim.x) {
    const float angle = __fmul_rn(p, a.frequencies[i]);
    a.y[row * a.y_stride + i] = __fmul_rn(cosf(angle), (float)a.scale);
    a.y[row * a.y_stride + a.half + i] = __fmul_rn(sinf(angle), (float)a.scale);
  }
}

// y = f(a, b) on rows × width elements. b: rows (b_stride), one row (0) or, with b_step 0, one number a row.
struct MapArgs {
  const float* a;
  i64 a_stride;
  const float* b;
  i64 b_stride, b_step;
  float* y;
  i64 y_stride, y_as, width, what, act;  // what: 0 gated, 1 activation, 2 add, 3 mul, 4 scale, 5 softcap
  double by;
  const i64* rows;
};

extern "C" __global__ void elementwise(MapArgs m) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, first = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (row >= *m.rows || first >= m.width) return;
  const int some = m.width - first < 4 ? (int)(m.width - first) : 4;
  const float by = (float)m.by;
  float v[4], b[4] = {};
  load_some<4>(m.a + row * m.a_stride + first, some, v);
  if (m.b && m.b_step) load_some<4>(m.b + row * m.b_stride + first, some, b);
  else if (m.b) b[0] = b[1] = b[2] = b[3] = m.b[row * m.b_stride];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = v[i];
    switch (m.what) {
      case 0: v[i] = activated(a, (int)m.act) * b[i]; break;
      case 1: v[i] = activated(a, (int)m.act); break;
      case 2: v[i] = a + b[i]; break;
      case 3: v[i] = a * b[i]; break;
      case 4: v[i] = a * by; break;
      case 5: v[i] = by * tanhf(a / by); break;
    }
  }
  put_some<4>(m.y, row, first, m.y_stride, m.y_as, some, v);
}

// Bytes of rows: all of them, or those that `index` names; 4 bytes at a time (`words` a row).
struct CopyArgs {
  const char* x;
  i64 x_stride;       // bytes
  const void* index;  // 0: row by row
  i64 wide, limit;
  char* y;
  i64 y_stride, words;
  const i64* rows;
};

extern "C" __global__ void move_rows(CopyArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (row >= *a.rows || i >= a.words) return;
  i64 from = row;
  if (a.index) from = a.wide ? ((const i64*)a.index)[row] : ((const int*)a.index)[row];
  if (from < 0 || from >= a.limit) return;
  ((u32*)(a.y + row * a.y_stride))[i] = ((const u32*)(a.x + from * a.x_stride))[i];
}

// f32 [rows][width] → bf16 with rows and width padded by zeros
struct RoundArgs {
  const float* x;
  i64 x_stride, width;
  float* y;
  i64 y_stride, y_as, y_width;
  const i64 *rows, *padded;
};

extern "C" __global__ void round_bf16(RoundArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, first = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (row >= *a.padded || first >= a.y_width) return;
  const i64 left = row < *a.rows ? a.width - first : 0;
  float v[4] = {};
  if (left > 0) load_some<4>(a.x + row * a.x_stride + first, left < 4 ? (int)left : 4, v);
  put_some<4>(a.y, row, first, a.y_stride, a.y_as, 4, v);
}

// bf16 rows of whole pieces of 64 channels → tiles
struct TilesArgs {
  const char* x;
  i64 x_stride, width;
  char* y;
  i64 y_rows, format;
  const i64* rows;
};

extern "C" __global__ void into_tiles(TilesArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, first = (blockIdx.x * 256 + threadIdx.x) * 8;
  if (row >= *a.rows || first >= a.width) return;
  const uint4 v = *(const uint4*)(a.x + (row * a.x_stride + first) * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *(u32*)(a.y + 2 * in_tiles(row, first + 2 * i, a.y_rows, a.format)) = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// f32 [rows][width] → i8/32: signed bytes, behind them the scales of blocks of 32. A warp a block.
struct QuantizeArgs {
  const float* x;
  i64 x_stride, width;
  char* y;
  i64 y_stride;
  const i64* rows;
};

extern "C" __global__ void quantize(QuantizeArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, block = blockIdx.x * 8 + (threadIdx.x >> 5), i = block * 32 + (threadIdx.x & 31);
  if (row >= *a.rows || block * 32 >= a.width) return;
  const float v = i < a.width ? a.x[row * a.x_stride + i] : 0.f;
  float most = fabsf(v);
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
  const float scale = __fdiv_rn(most, 127.f);
  const int q = __float2int_rn(__fdiv_rn(v, scale == 0.f ? 1.f : scale));
  char* y = a.y + row * a.y_stride;
  if (i < a.width) y[i] = (char)(q > 127 ? 127 : q < -127 ? -127 : q);
  if ((threadIdx.x & 31) == 0) memcpy(y + a.width + 4 * block, &scale, 4);
}

// The largest logit's token of each row; ties go to the lower one, NaN counts as −inf.
struct ArgmaxArgs {
  const float* x;
  i64 x_stride, width;
  int* y;
  float* best;   // [N][blocks]
  int* index;    // [N][blocks]
  int* through;  // [N], 0 before and after
  const i64* rows;
};

extern "C" __global__ void __launch_bounds__(512) argmax(ArgmaxArgs a) {
  __shared__ float values[16];
  __shared__ int where[16];
  __shared__ int last;
  let_others_start();
  after_others();
  const i64 row = blockIdx.y;
  if (row >= *a.rows) return;
  float v = -INFINITE;
  int at = 0x7fffffff;
  for (i64 i = blockIdx.x * 512 + threadIdx.x; i < a.width; i += (i64)gridDim.x * 512) {
    float x = a.x[row * a.x_stride + i];
    if (x != x) x = -INFINITE;
    better(v, at, fminf(x, LARGEST), (int)i);
  }
  for (int stage = 0; stage < 2; ++stage) {
    for (int o = 16; o; o >>= 1)
      better(v, at, __shfl_xor_sync(0xffffffffu, v, o), __shfl_xor_sync(0xffffffffu, at, o));
    if ((threadIdx.x & 31) == 0) { values[threadIdx.x >> 5] = v; where[threadIdx.x >> 5] = at; }
    __syncthreads();
    v = values[0]; at = where[0];
    for (int i = 1; i < 16; ++i) better(v, at, values[i], where[i]);
    __syncthreads();
    if (stage) break;
    if (threadIdx.x == 0) {
      a.best[row * gridDim.x + blockIdx.x] = v;
      a.index[row * gridDim.x + blockIdx.x] = at;
      __threadfence();
      last = atomicAdd(a.through + row, 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    v = -INFINITE; at = 0x7fffffff;
    for (int i = threadIdx.x; i < gridDim.x; i += 512)
      better(v, at, ((volatile float*)a.best)[row * gridDim.x + i], ((volatile int*)a.index)[row * gridDim.x + i]);
  }
  if (threadIdx.x == 0) {
    a.y[row] = v == -INFINITE ? 0 : at;
    a.through[row] = 0;
  }
}

// Logits as `sample` means them: NaN as −inf, no more than the largest float; seen tokens less likely.
struct PenaliseArgs {
  const float* x;
  i64 x_stride, width;
  const float* penalty;
  const int* history;
  const i64* history_stride;
  float* y;       // [N][width]
  double* uniform;  // [N]: a number in [0, 1) from seed and draw
  const i64 *seed, *draw, *rows;
};

__device__ __forceinline__ u64 splitmix64(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

extern "C" __global__ void drawable(PenaliseArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (row >= *a.rows || i >= a.width) return;
  const float x = a.x[row * a.x_stride + i];
  a.y[row * a.width + i] = x != x ? -INFINITE : fminf(x, LARGEST);
  if (i == 0) {
    const u64 bits = splitmix64((u64)a.seed[row] ^ splitmix64((u64)a.draw[row]));
    a.uniform[row] = (double)(bits >> 11) / 9007199254740992.0;
  }
}

extern "C" __global__ void penalise(PenaliseArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (row >= *a.rows || i >= *a.history_stride) return;
  const int id = a.history[row * *a.history_stride + i];
  const float p = a.penalty[row];
  if (id < 0 || id >= a.width || p == 1.f) return;
  float x = a.x[row * a.x_stride + id];  // as it came, so that a token that stands there twice is changed once
  if (x != x || x == -INFINITE) return;
  x = fminf(x, LARGEST);
  x = x > 0.f ? __fdiv_rn(x, p) : __fmul_rn(x, p);
  a.y[row * a.width + id] = fmaxf(fminf(x, LARGEST), -LARGEST);
}
