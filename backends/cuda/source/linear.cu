// y = x·wᵀ (+ bias) (+ residual) for few tokens, on tensor cores, at the pace at which weights can be read.
//
// A block of 16 warps makes 32 output channels at a time, two row groups (bf16: 16); each warp has its own range of K, copies
// those weights ahead of itself into a ring in shared memory, and the warps' sums are added in one order. The ring
// fills while the kernel before ends.
//
// Quantised weights meet x as whole numbers: a block of 32 activations has one scale, a power of two for which
// they become whole numbers of 31 bits or (two digits) 15 bits, and these are columns of signed bytes: one, two
// or four a token. So sums of 32 products are exact, and only they are rounded, in f32. One column is
// "act=i8/32". bf16 weights meet x as three columns of bf16, whose sum is the f32 value, or as one.
//
// With `act`, channel c of a tile's two groups are gate and up: y = act(gate)·up.
// With `norm_on`, x is first divided by its root mean square and multiplied by offset + norm.

struct LinearArgs {
  const char* w;         // rows of the first group
  i64 n, k;              // channels, inputs
  i64 second, tiles;     // groups from gate to up, or to the next one; how many tiles
  const void* x;
  i64 x_stride, x_kind;  // elements from row to row; 0 f32, 1 bf16, 2 i8/32
  const float* norm;     // with `norm_on`; 0: no weight
  i64 norm_on;
  double eps, offset;
  float* y;
  i64 y_stride, y_bf16;
  const float* bias;
  const float* residual;
  i64 residual_stride, act;
  const i64* rows;       // tokens in this step
  i64 tokens, digits;    // at most in one block; columns for each
  i64 span;              // blocks of 32 inputs in one slot of a ring
};

constexpr int WARPS = 16;
constexpr int MOST = 4;           // blocks of 32 inputs in a slot of a ring: `span` is no larger
constexpr int PITCH = WARPS + 1;  // of partial sums: neighbouring cells lie in different banks

// Row groups that a block of threads makes at a time.
template <int FORMAT>
constexpr int GROUPS = FORMAT == 16 ? 1 : 2;

// FORMAT 4: q4, 5: q4m, 8: q8, 16: bf16. Bytes of a row group's block of 32 inputs: quants, then scales.
template <int FORMAT>
constexpr int QUANTS = FORMAT == 16 ? 1024 : FORMAT == 8 ? 512 : 256;
template <int FORMAT>
constexpr int BLOCK = FORMAT == 16 ? 1024 : FORMAT == 8 ? 544 : FORMAT == 5 ? 320 : 288;

__device__ __forceinline__ i64 group_bytes(int nblk, i64 format) {
  return (i64)nblk * (format == 8 ? 544 : format == 5 ? 320 : 288);
}

// Copies the blocks [b, b+count) of a row group into a ring's slot: quants, scales, minima behind each other;
// bf16: 16 rows of 128 bytes, whose pieces of 16 bytes are swapped so that rows lie in different banks.
template <int FORMAT>
__device__ __forceinline__ void fetch(
    char* slot, const LinearArgs& a, i64 group, int nblk, int b, int count, int span, int lane) {
  if constexpr (FORMAT == 16) {
    const i64 last = a.n * (a.act ? 2 : 1) - 1;
    const int piece = lane & 7, first = b * 32 + piece * 8;
    const bool in = piece < count * 4 && first < a.k;  // k is a multiple of 8 here
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + (lane >> 3);
      i64 row = group * 16 + r;
      row = row < last ? row : last;
      copy_ahead(slot + r * 128 + (piece ^ ((r & 1) << 2 | (r >> 1 & 3))) * 16,
                 a.w + (row * a.k + (in ? first : 0)) * 2, in);
    }
  } else {
    const char* from = a.w + group * group_bytes(nblk, FORMAT);
    const char* quants = from + (i64)b * QUANTS<FORMAT>;
    // q8: words of inputs 8j… first, then those of 8j+4…
    const int to = FORMAT == 8 ? (lane & 4) << 2 | (lane & 24) >> 1 | (lane & 3) : lane;
#pragma unroll
    for (int c = 0; c < MOST * QUANTS<FORMAT> / 16; c += 32)
      if (c + lane < count * (QUANTS<FORMAT> / 16)) copy_ahead(slot + (c + to) * 16, quants + (c + lane) * 16, true);
    const char* scales = from + nblk * QUANTS<FORMAT> + b * 32;
    if (lane < count * 2) {
      copy_ahead(slot + span * QUANTS<FORMAT> + lane * 16, scales + lane * 16, true);
      if constexpr (FORMAT == 5)
        copy_ahead(slot + span * (QUANTS<5> + 32) + lane * 16, scales + nblk * 32 + lane * 16, true);
    }
  }
}

// What a block keeps of x in shared memory.
struct Columns {
  char* values;   // [block of 32][column][4 pieces of 8]: bytes, or bf16
  float* scales;  // [block][token]
  float* sums;    // [block][column], q4m: of x, in the first column of a token
  int count;      // columns
  int digits;     // of a token
};

constexpr float MAGIC = 12582912.f;  // 1.5·2²³: a whole number added to its bits is added to its value

// Where a thread finds its part of the columns of one block of 32 inputs. Columns that nobody has are read all
// the same: what comes of them is nobody's sum.
template <int FORMAT, int NT>
struct Part {
  const char* values;
  const float *first, *second;   // scales of its two columns' tokens
  const float* sums;
  int offset[FORMAT == 16 ? NT : 1];  // bf16: bytes to the column of each tile
};

template <int FORMAT, int NT>
__device__ __forceinline__ Part<FORMAT, NT> part_of(const Columns& x, int tokens, int shift, int at, int lane) {
  const int g = lane >> 2, j = lane & 3;
  Part<FORMAT, NT> p;
  if constexpr (FORMAT == 16) {
    p.values = x.values + at * x.count * 64 + j * 16;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const int column = t * 8 + g;
      p.offset[t] = 64 * (x.digits == 1 ? column : (column >> 2) * 3 + ((column & 3) < 2 ? column & 3 : 2));
    }
  } else {
    p.values = x.values + (at * x.count + g) * 32 + j * 8;
    p.first = x.scales + at * tokens + (2 * j >> shift);
    p.second = x.scales + at * tokens + (2 * j + 1 >> shift);
    p.sums = x.sums + at * x.count + 2 * j;
  }
  return p;
}

// sums[tile of columns][4]: row 2g of columns 2j and 2j+1, then row 2g+1 (bf16: rows g and g+8)
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply(
    const char* slot, int span, int b, const Part<FORMAT, NT>& p, int shift, int lane, float (*sums)[NT][4]) {
  const int g = lane >> 2, j = lane & 3;
  if constexpr (FORMAT == 16) {
    // two blocks share a slot's rows of 128 bytes
    const char* rows = slot + (b & ~1) * 1024;
    const int piece = ((b & 1) * 4 + j) ^ ((g & 1) << 2 | (g >> 1 & 3));
    const uint4 v = *(const uint4*)(rows + g * 128 + piece * 16);
    const uint4 w = *(const uint4*)(rows + (g + 8) * 128 + piece * 16);
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const uint4 c = *(const uint4*)(p.values + p.offset[t]);
      mma(sums[0][t], v.x, w.x, v.y, w.y, c.x, c.y);
      mma(sums[0][t], v.z, w.z, v.w, w.w, c.z, c.w);
    }
  } else {
    uint2 m[NT];
    float s[NT], r[NT], x[NT], y[NT];
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      m[t] = *(const uint2*)(p.values + t * 256);
      s[t] = p.first[t * 8 >> shift];
      r[t] = shift ? s[t] : p.second[t * 8];
      if constexpr (FORMAT == 5) { x[t] = p.sums[t * 8]; y[t] = p.sums[t * 8 + 1]; }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const char* group = slot + u * span * BLOCK<FORMAT>;
      const char* quants = group + b * QUANTS<FORMAT> + j * 64 + g * 8;
      const uint2 v = *(const uint2*)quants;
      u32 a0, a1, a2, a3;
      if constexpr (FORMAT == 8) {
        const uint2 w = *(const uint2*)(quants + 256);
        a0 = v.x; a1 = v.y; a2 = w.x; a3 = w.y;
      } else if constexpr (FORMAT == 4) {
        a0 = less_eight(v.x << 4); a1 = less_eight(v.y << 4);
        a2 = less_eight(v.x); a3 = less_eight(v.y);
      } else {
        a0 = v.x & 0x0f0f0f0fu; a1 = v.y & 0x0f0f0f0fu; a2 = v.x >> 4 & 0x0f0f0f0fu; a3 = v.y >> 4 & 0x0f0f0f0fu;
      }
      const char* scales = group + span * QUANTS<FORMAT> + b * 32 + g * 4;
      const u32 both = *(const u32*)scales;
      const float low = half_to_float((u16)both), high = half_to_float((u16)(both >> 16));
      float least = 0.f, most = 0.f;
      if constexpr (FORMAT == 5) {
        const u32 two = *(const u32*)(scales + span * 32);
        least = half_to_float((u16)two); most = half_to_float((u16)(two >> 16));
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        float* sum = sums[u][t];
        int d[4];
        mma_bytes(d, a0, a1, a2, a3, m[t].x, m[t].y, 0x4b400000);
        sum[0] = __fmaf_rn(__fmul_rn(low, s[t]), __int_as_float(d[0]) - MAGIC, sum[0]);
        sum[1] = __fmaf_rn(__fmul_rn(low, r[t]), __int_as_float(d[1]) - MAGIC, sum[1]);
        sum[2] = __fmaf_rn(__fmul_rn(high, s[t]), __int_as_float(d[2]) - MAGIC, sum[2]);
        sum[3] = __fmaf_rn(__fmul_rn(high, r[t]), __int_as_float(d[3]) - MAGIC, sum[3]);
        if constexpr (FORMAT == 5) {
          sum[0] = __fmaf_rn(least, x[t], sum[0]);
          sum[1] = __fmaf_rn(least, y[t], sum[1]);
          sum[2] = __fmaf_rn(most, x[t], sum[2]);
          sum[3] = __fmaf_rn(most, y[t], sum[3]);
        }
      }
    }
  }
}

// Piece `at` of token `row`, eight activations; zeros beyond k.
__device__ __forceinline__ void load8(const LinearArgs& a, i64 row, int at, float* v) {
  const float* x = (const float*)a.x + row * a.x_stride + 8 * at;
  if (a.x_kind == 0 && 8 * at + 8 <= a.k && !(a.x_stride & 3)) {
    const float4 p = *(const float4*)x, q = *(const float4*)(x + 4);
    v[0] = p.x; v[1] = p.y; v[2] = p.z; v[3] = p.w; v[4] = q.x; v[5] = q.y; v[6] = q.z; v[7] = q.w;
    return;
  }
  const u16* h = (const u16*)a.x + row * a.x_stride + 8 * at;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 8 * at + i >= a.k ? 0.f : a.x_kind ? float_of(h[i]) : x[i];
}

// What a piece is multiplied by when it is normalised.
__device__ __forceinline__ void weights8(const LinearArgs& a, int at, float* w) {
  if (a.norm && 8 * at + 8 <= a.k) {
    const float4 p = *(const float4*)(a.norm + 8 * at), q = *(const float4*)(a.norm + 8 * at + 4);
    w[0] = p.x; w[1] = p.y; w[2] = p.z; w[3] = p.w; w[4] = q.x; w[5] = q.y; w[6] = q.z; w[7] = q.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = a.norm && 8 * at + i < a.k ? a.norm[8 * at + i] : 0.f;
}

__device__ __forceinline__ void scale8(const LinearArgs& a, float inverse, const float* w, float* v) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = __fmul_rn(v[i], inverse);
    if (a.norm) v[i] = __fmul_rn(v[i], __fadd_rn((float)a.offset, w[i]));
  }
}

// Three bf16 whose sum is v, each in the upper half of a word.
__device__ __forceinline__ void split(float v, u32& high, u32& mid, u32& low) {
  high = bf16_of(v);
  const float h = float_of(high), rest = fabsf(h) < INFINITE ? v - h : 0.f;
  mid = bf16_of(rest);
  low = bf16_of(rest - float_of(mid));
}

__device__ __forceinline__ u32 pair(u32 a, u32 b) { return a | b << 16; }

__device__ __forceinline__ void place_bf16(const float* v, int at, int t, const Columns& x) {
  u32 c[3][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) split(v[i], c[0][i], c[1][i], c[2][i]);
  uint4* to = (uint4*)x.values + (i64)((at >> 2) * x.count + t * x.digits) * 4 + (at & 3);
#pragma unroll
  for (int d = 0; d < 3; ++d)
    if (d < x.digits)
      to[4 * d] = make_uint4(pair(c[d][0], c[d][1]), pair(c[d][2], c[d][3]), pair(c[d][4], c[d][5]),
                             pair(c[d][6], c[d][7]));
}

// Four words' bytes number d side by side, for each d.
__device__ __forceinline__ void transpose(const int* z, u32* out) {
  const u32 a = bytes_of(z[0], z[1], 0x5140), b = bytes_of(z[2], z[3], 0x5140);
  const u32 c = bytes_of(z[0], z[1], 0x7362), d = bytes_of(z[2], z[3], 0x7362);
  out[0] = bytes_of(a, b, 0x5410); out[1] = bytes_of(a, b, 0x7632);
  out[2] = bytes_of(c, d, 0x5410); out[3] = bytes_of(c, d, 0x7632);
}

// The whole numbers of eight activations and their scale; four neighbouring lanes have a block of 32. Two digits
// are for "act=bf16".
__device__ __forceinline__ float whole_numbers(float* v, int digits, int* z) {
  if (digits == 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = float_of(bf16_of(v[i]));
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = v[i] == v[i] ? fmaxf(most, fabsf(v[i])) : INFINITE;
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  if (most == INFINITE) {
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = 0;
    return __int_as_float(0x7fc00000);
  }
  if (digits == 1) {
    const float scale = __fdiv_rn(most, 127.f), by = scale == 0.f ? 1.f : scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int q = __float2int_rn(__fdiv_rn(v[i], by));
      z[i] = q > 127 ? 127 : q < -127 ? -127 : q;
    }
    return scale;
  }
  const int exponent = (int)(__float_as_uint(most) >> 23);
  int power = (digits == 4 ? 283 : 267) - exponent;  // 2^(29 or 13 − exponent), biased
  power = power < 253 ? power : 253;
  const float by = __int_as_float(power << 23);
  const int half = digits == 4 ? 0x00808080 : 0x80;
#pragma unroll
  for (int i = 0; i < 8; ++i) z[i] = (__float2int_rn(__fmul_rn(v[i], by)) + half) ^ half;
  return __int_as_float((254 - power) << 23);
}

// Whole numbers z with their scale and, for q4m, the sum of what they stand for.
template <int FORMAT>
__device__ __forceinline__ void place_bytes(
    const int* z, float scale, float sum, int at, int t, int tokens, bool in, const Columns& x) {
  if (FORMAT == 5) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  }
  if (!in) return;
  const int b = at >> 2, j = at & 3;
  u32 low[4], high[4];
  transpose(z, low);
  transpose(z + 4, high);
  uint2* to = (uint2*)x.values + (b * x.count + t * x.digits) * 4 + j;
#pragma unroll
  for (int d = 0; d < 4; ++d)
    if (d < x.digits) {
      to[4 * d] = make_uint2(low[d], high[d]);
      if (FORMAT == 5 && j == 0) x.sums[b * x.count + t * x.digits + d] = d ? 0.f : sum;
    }
  if (j == 0) x.scales[b * tokens + t] = FORMAT == 4 ? scale * 0.0625f : scale;
}

// Eight bytes of an i8/32 row, and their block's scale.
__device__ __forceinline__ float bytes8(const LinearArgs& a, i64 row, int at, int* z) {
  const char* q = (const char*)a.x + row * a.x_stride;
  if (!((a.k | a.x_stride) & 7)) {
    const uint2 both = *(const uint2*)(q + 8 * at);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = (int)(signed char)((i < 4 ? both.x : both.y) >> 8 * (i & 3));
    return *(const float*)(q + a.k + 4 * (at >> 2));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) z[i] = 8 * at + i < a.k ? (int)(signed char)q[8 * at + i] : 0;
  float scale;
  memcpy(&scale, q + a.k + 4 * (at >> 2), 4);
  return scale;
}

// x of a token as columns. w: what the thread's first piece is multiplied by. A piece is on its way while the
// one before is placed.
template <int FORMAT>
__device__ __forceinline__ void stage(
    const LinearArgs& a, i64 row, int t, int tokens, const float* w, const Columns& x, float* room) {
  const int pieces = ((int)a.k + 31) / 32 * 4, end = (pieces + 31) / 32 * 32;
  float v[8], next[8], by[8], inverse = 1.f;
  const bool floats = a.x_kind != 2;
  if (floats) load8(a, row, threadIdx.x, v);
  if (a.norm_on) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    for (int at = threadIdx.x + 512; at < pieces; at += 512) {
      load8(a, row, at, next);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(next[i], next[i], sum);
    }
    inverse = inverse_rms(sum, (int)a.k, (float)a.eps, room);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) by[i] = w[i];
  for (int at = threadIdx.x; at < end; at += 512) {
    const bool in = at < pieces;
    int z[8];
    float scale = 0.f, sum = 0.f;
    if (floats) {
      if (at + 512 < end) load8(a, row, at + 512, next);
      if (a.norm_on) scale8(a, inverse, by, v);
      if constexpr (FORMAT == 16) {
        if (in) place_bf16(v, at, t, x);
      } else {
        scale = whole_numbers(v, x.digits, z);
        if (FORMAT == 5 && x.digits > 1)
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += v[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = next[i];
      if (a.norm_on && at + 512 < end) weights8(a, at + 512, by);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = 0;
      if (in) scale = bytes8(a, row, at, z);
    }
    if constexpr (FORMAT != 16) {
      if (FORMAT == 5 && x.digits == 1)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += scale * (float)z[i];
      place_bytes<FORMAT>(z, scale, sum, at, t, tokens, in, x);
    }
  }
}

__device__ __forceinline__ float addend(const LinearArgs& a, i64 token, i64 channel) {
  float v = a.bias ? a.bias[channel] : 0.f;
  if (a.residual) v += a.residual[token * a.residual_stride + channel];
  return v;
}

__device__ __forceinline__ void write_result(const LinearArgs& a, i64 token, i64 channel, float v) {
  if (a.y_bf16) ((u16*)a.y)[token * a.y_stride + channel] = (u16)bf16_of(v);
  else a.y[token * a.y_stride + channel] = v;
}

// A warp's sums into parts[token·16 + row][warp], digits joined.
template <int FORMAT, int NT>
__device__ __forceinline__ void hand_over(float* parts, float (*sums)[4], int digits, int tokens, int lane, int warp) {
  const int g = lane >> 2, j = lane & 3;
  const int row = FORMAT == 16 ? g : 2 * g, next = FORMAT == 16 ? g + 8 : 2 * g + 1;
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    float* s = sums[t];
    if (digits == 1) {
      const int token = t * 8 + 2 * j;
      if (token < tokens) {
        parts[(token * 16 + row) * PITCH + warp] = s[0];
        parts[(token * 16 + next) * PITCH + warp] = s[2];
      }
      if (token + 1 < tokens) {
        parts[(token * 16 + 16 + row) * PITCH + warp] = s[1];
        parts[(token * 16 + 16 + next) * PITCH + warp] = s[3];
      }
      continue;
    }
    float first, second;
    if (FORMAT == 16) {  // columns 0 1 | 2 and none
      first = j & 1 ? s[0] : s[0] + s[1];
      second = j & 1 ? s[2] : s[2] + s[3];
    } else {
      const float by = digits == 4 && (j & 1) ? 65536.f : 1.f;
      first = by * __fmaf_rn(256.f, s[1], s[0]);
      second = by * __fmaf_rn(256.f, s[3], s[2]);
    }
    if (digits != 2) {
      first += __shfl_xor_sync(0xffffffffu, first, 1);
      second += __shfl_xor_sync(0xffffffffu, second, 1);
    }
    const int token = digits == 2 ? t * 4 + j : t * 2 + (j >> 1);
    if (token < tokens && (digits == 2 || !(j & 1))) {
      parts[(token * 16 + row) * PITCH + warp] = first;
      parts[(token * 16 + next) * PITCH + warp] = second;
    }
  }
}

template <int FORMAT, int NT, int DEPTH>
__device__ __forceinline__ void linear(const LinearArgs& a) {
  constexpr int U = GROUPS<FORMAT>;
  SHARED_BYTES(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // bf16: gate and up one after the other
  const int nblk = ((int)a.k + 31) / 32, span = (int)a.span, halves = a.act && U == 1 ? 2 : 1;
  const int share = (nblk + WARPS - 1) / WARPS, from = warp * share;
  const int mine = nblk - from < share ? nblk - from : share, pieces = (share + span - 1) / span;
  const int slot_bytes = U * span * BLOCK<FORMAT>, tiles = (int)a.tiles;
  const int groups = ((int)a.n * (a.act ? 2 : 1) + 15) / 16, apart = a.act ? 1 : U;
  char* ring = shared + warp * DEPTH * slot_bytes;
  // where copying stands
  int tile = blockIdx.x, half = 0, piece = 0;
  auto copy_next = [&](int slot) {
    if (tile < tiles) {
      const int left = mine - piece * span, count = left < span ? left : span;
      if (count > 0)
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int group = tile * apart + (u + half) * (int)a.second;
          fetch<FORMAT>(ring + (slot * U + u) * span * BLOCK<FORMAT>, a, group < groups ? group : groups - 1, nblk,
                        from + piece * span, count, span, lane);
        }
      if (++piece == pieces) {
        piece = 0;
        if (++half == halves) { half = 0; tile += gridDim.x; }
      }
    }
    copies_end();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) copy_next(i);
  float w[8];
  if (a.norm_on) weights8(a, threadIdx.x, w);
  const i64 first = blockIdx.y * a.tokens, left = from_host(a.rows) - first;
  const int tokens = (int)(left < a.tokens ? left : a.tokens);
  after_others();
  if (tokens <= 0) return;
  Columns x;
  x.digits = FORMAT == 16 && a.digits > 1 ? 3 : (int)a.digits;
  x.count = tokens * x.digits;
  x.values = shared + WARPS * DEPTH * slot_bytes;
  x.scales = (float*)(x.values + nblk * x.count * (FORMAT == 16 ? 64 : 32));
  x.sums = x.scales + (FORMAT == 16 ? 0 : nblk * tokens);
  const int cells = 16 * tokens, half_cells = U * cells * PITCH;
  float* kept = x.sums + (FORMAT == 5 ? nblk * x.count : 0);  // [cell]: gates, bf16
  float* parts = kept + (U == 1 ? cells : 0);                 // [1 or 2][group][cell][PITCH]
  const int buffer = tokens <= 4 ? half_cells : 0;
  for (int t = 0; t < tokens; ++t) stage<FORMAT>(a, first + t, t, tokens, w, x, parts);
  __syncthreads();
  const int shift = x.digits == 4 ? 2 : x.digits == 2 ? 1 : 0, step = x.count * (FORMAT == 16 ? 64 : 32);
  const int cell = threadIdx.x >> 4;
  const bool lead = (threadIdx.x & 15) == 0;
  int slot = 0, turn = 0;
  for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
    // not sooner: the next kernel's blocks would crowd where this one's end first
    if (at + gridDim.x >= tiles) let_others_start();
    for (int h = 0; h < halves; ++h, turn ^= 1) {
      float sums[U][NT][4];
#pragma unroll
      for (int i = 0; i < U * NT * 4; ++i) (&sums[0][0][0])[i] = 0.f;
      Part<FORMAT, NT> part = part_of<FORMAT, NT>(x, tokens, shift, from, lane);
      for (int p = 0; p < pieces; ++p) {
        const int rest = mine - p * span, count = rest < span ? rest : span;
        copies_but<DEPTH - 1>();
        __syncwarp();
        const char* here = ring + slot * slot_bytes;
        auto one = [&](int b) {
          multiply<FORMAT, NT>(here, span, b, part, shift, lane, sums);
          part.values += step;
          if constexpr (FORMAT != 16) { part.first += tokens; part.second += tokens; }
          if constexpr (FORMAT == 5) part.sums += x.count;
        };
        if (count == MOST) {
#pragma unroll
          for (int b = 0; b < MOST; ++b) one(b);
        } else {
          for (int b = 0; b < count; ++b) one(b);
        }
        __syncwarp();
        copy_next(slot);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
      }
      float* sets = parts + turn * buffer;
#pragma unroll
      for (int u = 0; u < U; ++u)
        hand_over<FORMAT, NT>(sets + u * cells * PITCH, sums[u], x.digits, tokens, lane, warp);
      const bool last = h + 1 == halves, gated = a.act != 0;
      const int results = gated || U == 1 ? cells : 2 * cells;
      auto channel_of = [&](int c) { return (i64)(at * apart + (c >= cells ? 1 : 0)) * 16 + (c & 15); };
      auto token_of = [&](int c) { return first + (c >= cells ? c - cells : c) / 16; };
      float more = 0.f;  // on its way while the others get here
      if (lead && last && cell < results && channel_of(cell) < a.n) more = addend(a, token_of(cell), channel_of(cell));
      __syncthreads();
      for (int c = cell; c < results; c += 32) {
        float v = sets[c * PITCH + (threadIdx.x & 15)];
        float up = U == 2 && gated ? sets[(cells + c) * PITCH + (threadIdx.x & 15)] : 0.f;
        for (int o = 8; o; o >>= 1) {
          v += __shfl_xor_sync(0xffffffffu, v, o);
          if (U == 2 && gated) up += __shfl_xor_sync(0xffffffffu, up, o);
        }
        const i64 channel = channel_of(c);
        if (!lead || channel >= a.n) continue;
        if (c != cell) more = addend(a, token_of(c), channel);
        if (!last) { kept[c] = v; continue; }
        if (gated) v = U == 2 ? __fmul_rn(activated(v, (int)a.act), up) : __fmul_rn(activated(kept[c], (int)a.act), v);
        write_result(a, token_of(c), channel, __fadd_rn(v, more));
      }
      if (!buffer) __syncthreads();
    }
  }
}

#define LINEAR(name, format, nt, depth, blocks) \
  extern "C" __global__ void __launch_bounds__(512, blocks) name(LinearArgs a) { linear<format, nt, depth>(a); }

LINEAR(linear_q4_1, 4, 1, 2, 1)
LINEAR(linear_q4_2, 4, 2, 2, 1)
LINEAR(linear_q4_4, 4, 4, 2, 1)
LINEAR(linear_q4m_1, 5, 1, 2, 1)
LINEAR(linear_q4m_2, 5, 2, 2, 1)
LINEAR(linear_q4m_4, 5, 4, 2, 1)
LINEAR(linear_q8_1, 8, 1, 2, 1)
LINEAR(linear_q8_2, 8, 2, 2, 1)
LINEAR(linear_q8_4, 8, 4, 2, 1)
LINEAR(linear_bf16_1, 16, 1, 2, 1)
LINEAR(linear_bf16_2, 16, 2, 2, 1)
LINEAR(linear_bf16_4, 16, 4, 2, 1)

// Any layout of plain elements and any K, in f32: one warp a channel, one token a block row.
struct PlainArgs {
  const char* w;
  const i64* w_at;
  i64 n, k, format;  // 0 f32, 1 f16, 2 bf16
  const float* x;
  i64 x_stride;
  float* y;
  i64 y_stride;
  const float* bias;
  const float* residual;
  i64 residual_stride;
  const i64* rows;
};

__device__ __forceinline__ float element(const char* p, i64 i, int format) {
  if (format == 0) return ((const float*)p)[i];
  const u16 h = ((const u16*)p)[i];
  return format == 1 ? half_to_float(h) : float_of(h);
}

extern "C" __global__ void linear_plain(PlainArgs a) {
  let_others_start();
  after_others();
  const i64 token = blockIdx.y, channel = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (token >= *a.rows || channel >= a.n) return;
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const float* x = a.x + token * a.x_stride;
  float sum = 0.f;
  for (i64 k = threadIdx.x & 31; k < a.k; k += 32)
    sum = __fmaf_rn(x[k], element(w, channel * a.k + k, (int)a.format), sum);
  sum = warp_sum(sum);
  if (threadIdx.x & 31) return;
  if (a.bias) sum += a.bias[channel];
  if (a.residual) sum += a.residual[token * a.residual_stride + channel];
  a.y[token * a.y_stride + channel] = sum;
}

// Rows of a packed matrix as bf16 [n, k], for a library's matrix product.
struct UnpackArgs {
  const char* w;
  const i64* w_at;
  i64 n, k, format;  // 4 q4, 5 q4m, 8 q8
  u16* y;
};

__device__ __forceinline__ float unpacked(const char* group, int nblk, int r, i64 k, int format) {
  const i64 b = k >> 5, i = k & 31;
  const u8* q = (const u8*)group;
  const i64 quants = (i64)nblk * (format == 8 ? 512 : 256);
  const u16* halves = (const u16*)(group + quants);
  const float scale = half_to_float(halves[b * 16 + r]);
  if (format == 8) return scale * (float)(signed char)q[b * 512 + (i >> 2) * 64 + r * 4 + (i & 3)];
  const u8 both = q[b * 256 + (i >> 3) * 64 + r * 4 + (i & 3)];
  const float n = (float)((i & 4) ? both >> 4 : both & 15);
  if (format == 4) return scale * (n - 8.f);
  return __fadd_rn(__fmul_rn(scale, n), half_to_float(halves[(i64)nblk * 16 + b * 16 + r]));
}

// A warp takes a block of 32 inputs of 16 rows, two lanes a row.
extern "C" __global__ void __launch_bounds__(256) unpack(UnpackArgs a) {
  let_others_start();
  after_others();
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const int nblk = ((int)a.k + 31) / 32, lane = threadIdx.x & 31, format = (int)a.format;
  const i64 size = group_bytes(nblk, format), all = (a.n + 15) / 16 * nblk;
  const int r = lane >> 1, half = lane & 1;
  for (i64 i = blockIdx.x * 8 + (threadIdx.x >> 5); i < all; i += (i64)gridDim.x * 8) {
    const i64 group = i / nblk, row = group * 16 + r;
    const int b = (int)(i % nblk), k = b * 32 + half * 16;
    const char* from = w + group * size;
    const char* quants = from + (i64)b * (format == 8 ? 512 : 256);
    const u16* scales = (const u16*)(from + (i64)nblk * (format == 8 ? 512 : 256)) + b * 16 + r;
    const float scale = half_to_float(scales[0]), least = format == 5 ? half_to_float(scales[(i64)nblk * 16]) : 0.f;
    u32 out[8];
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // four values each
      float v[4];
      if (format == 8) {
        const u32 q = *(const u32*)(quants + (4 * half + c) * 64 + r * 4);
        for (int e = 0; e < 4; ++e) v[e] = scale * (float)(signed char)(q >> 8 * e);
      } else {
        const u32 q = *(const u32*)(quants + (2 * half + (c >> 1)) * 64 + r * 4) >> 4 * (c & 1);
        for (int e = 0; e < 4; ++e) {
          const float n = (float)(q >> 8 * e & 15);
          v[e] = format == 4 ? scale * (n - 8.f) : __fadd_rn(__fmul_rn(scale, n), least);
        }
      }
      out[2 * c] = pair(bf16_of(v[0]), bf16_of(v[1]));
      out[2 * c + 1] = pair(bf16_of(v[2]), bf16_of(v[3]));
    }
    if (row >= a.n) continue;
    u16* y = a.y + row * a.k + k;
    if (k + 16 <= a.k && a.k % 8 == 0) {
      *(uint4*)y = make_uint4(out[0], out[1], out[2], out[3]);
      *(uint4*)(y + 8) = make_uint4(out[4], out[5], out[6], out[7]);
    } else {
      for (int e = 0; e < 16; ++e) if (k + e < a.k) y[e] = (u16)(out[e >> 1] >> 16 * (e & 1));
    }
  }
}

struct EmbeddingArgs {
  const void* ids;
  i64 wide;            // ids are i64
  const char* w;
  const i64* w_at;
  i64 n, k, format;    // 0 f32, 1 f16, 2 bf16; 4, 5, 8
  float* y;
  i64 y_stride;
  const i64* rows;
};

extern "C" __global__ void embedding(EmbeddingArgs a) {
  let_others_start();
  after_others();
  const i64 token = blockIdx.y, k = blockIdx.x * 256 + threadIdx.x;
  if (token >= *a.rows || k >= a.k) return;
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const i64 id = a.wide ? ((const i64*)a.ids)[token] : ((const int*)a.ids)[token];
  float v = __int_as_float(0x7fc00000);
  if (id >= 0 && id < a.n) {
    const int nblk = ((int)a.k + 31) / 32;
    const i64 size = (i64)nblk * (a.format == 8 ? 544 : a.format == 5 ? 320 : 288);
    v = a.format < 4 ? element(w, id * a.k + k, (int)a.format)
                     : unpacked(w + id / 16 * size, nblk, (int)(id % 16), k, (int)a.format);
  }
  a.y[token * a.y_stride + k] = v;
}
