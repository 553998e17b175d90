// y = x·wᵀ (+ bias) (+ residual) for few tokens, on tensor cores, at the pace at which weights can be read.
//
// A block of 16 warps makes 16 output channels at a time, a row group; each warp has its own range of K, copies
// those weights ahead of itself into a ring in shared memory, and the warps' sums are added in one order. The
// ring fills, and the weights behind it go to the L2 cache, while the kernel before still runs.
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
  i64 second, tiles;     // with act: groups from gate to up; how many tiles
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
  i64 span, ahead;       // blocks of 32 inputs in one slot of a ring; tiles that go to the L2 cache beforehand
};

constexpr int WARPS = 16;
constexpr int PITCH = WARPS + 1;  // of partial sums: neighbouring cells lie in different banks

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
    for (int c = lane; c < count * (QUANTS<FORMAT> / 16); c += 32) {
      // q8: words of inputs 8j… first, then those of 8j+4…
      const int to = FORMAT == 8 ? (c & ~31) | (c & 4) << 2 | (c & 24) >> 1 | (c & 3) : c;
      copy_ahead(slot + to * 16, quants + c * 16, true);
    }
    const char* scales = from + (i64)nblk * QUANTS<FORMAT> + b * 32;
    for (int c = lane; c < count * 2; c += 32) {
      copy_ahead(slot + span * QUANTS<FORMAT> + c * 16, scales + c * 16, true);
      if constexpr (FORMAT == 5)
        copy_ahead(slot + span * (QUANTS<5> + 32) + c * 16, scales + (i64)nblk * 32 + c * 16, true);
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

// sums[tile of columns][4]: rows 2g, 2g of columns 2j, 2j+1, then row 2g+1 (bf16: rows g and g+8)
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply(
    const char* slot, int b, int at, int span, const Columns& x, int tokens, int shift, int lane, float (*sums)[4]) {
  const int g = lane >> 2, j = lane & 3;
  if constexpr (FORMAT == 16) {
    // two blocks share a slot's rows of 128 bytes
    const char* rows = slot + (b & ~1) * 1024;
    const int piece = (b & 1) * 4 + j;
    const uint4 v = *(const uint4*)(rows + g * 128 + (piece ^ ((g & 1) << 2 | (g >> 1 & 3))) * 16);
    const uint4 w = *(const uint4*)(rows + (g + 8) * 128 + (piece ^ ((g & 1) << 2 | (g >> 1 & 3))) * 16);
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      int column = t * 8 + g;
      if (x.digits > 1) column = (column >> 2) * 3 + ((column & 3) < 2 ? column & 3 : 2);
      column = column < x.count ? column : x.count - 1;
      const uint4 c = ((const uint4*)x.values)[((i64)at * x.count + column) * 4 + j];
      mma(sums[t], v.x, w.x, v.y, w.y, c.x, c.y);
      mma(sums[t], v.z, w.z, v.w, w.w, c.z, c.w);
    }
  } else {
    const uint2 v = *(const uint2*)(slot + b * QUANTS<FORMAT> + j * 64 + g * 8);
    u32 a0, a1, a2, a3;
    if constexpr (FORMAT == 8) {
      const uint2 w = *(const uint2*)(slot + b * 512 + 256 + j * 64 + g * 8);
      a0 = v.x; a1 = v.y; a2 = w.x; a3 = w.y;
    } else if constexpr (FORMAT == 4) {  // 16·(q − 8) as signed bytes
      a0 = (v.x << 4 & 0xf0f0f0f0u) ^ 0x80808080u; a1 = (v.y << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
      a2 = (v.x & 0xf0f0f0f0u) ^ 0x80808080u; a3 = (v.y & 0xf0f0f0f0u) ^ 0x80808080u;
    } else {
      a0 = v.x & 0x0f0f0f0fu; a1 = v.y & 0x0f0f0f0fu; a2 = v.x >> 4 & 0x0f0f0f0fu; a3 = v.y >> 4 & 0x0f0f0f0fu;
    }
    const u32 both = *(const u32*)(slot + span * QUANTS<FORMAT> + b * 32 + g * 4);
    const float low = half_to_float((u16)both), high = half_to_float((u16)(both >> 16));
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const int c = t * 8 + 2 * j;
      int column = t * 8 + g;
      column = column < x.count ? column : x.count - 1;
      const uint2 m = ((const uint2*)x.values)[(at * x.count + column) * 4 + j];
      int d[4];
      mma_bytes(d, a0, a1, a2, a3, m.x, m.y, 0x4b400000);
      int token = c >> shift, other = (c + 1) >> shift;
      token = token < tokens ? token : tokens - 1;
      other = other < tokens ? other : tokens - 1;
      const float s = x.scales[at * tokens + token], r = x.scales[at * tokens + other];
      sums[t][0] = __fmaf_rn(low * s, __int_as_float(d[0]) - MAGIC, sums[t][0]);
      sums[t][1] = __fmaf_rn(low * r, __int_as_float(d[1]) - MAGIC, sums[t][1]);
      sums[t][2] = __fmaf_rn(high * s, __int_as_float(d[2]) - MAGIC, sums[t][2]);
      sums[t][3] = __fmaf_rn(high * r, __int_as_float(d[3]) - MAGIC, sums[t][3]);
      if constexpr (FORMAT == 5) {
        const u32 two = *(const u32*)(slot + span * 288 + b * 32 + g * 4);
        const float least = half_to_float((u16)two), most = half_to_float((u16)(two >> 16));
        const float p = c < x.count ? x.sums[at * x.count + c] : 0.f;
        const float q = c + 1 < x.count ? x.sums[at * x.count + c + 1] : 0.f;
        sums[t][0] = __fmaf_rn(least, p, sums[t][0]);
        sums[t][1] = __fmaf_rn(least, q, sums[t][1]);
        sums[t][2] = __fmaf_rn(most, p, sums[t][2]);
        sums[t][3] = __fmaf_rn(most, q, sums[t][3]);
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
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = !a.norm ? 1.f : 8 * at + i < a.k ? a.norm[8 * at + i] : 0.f;
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

// x of a token as columns. w: what the thread's first piece is multiplied by.
template <int FORMAT>
__device__ __forceinline__ void stage(
    const LinearArgs& a, i64 row, int t, int tokens, const float* w, const Columns& x, float* room) {
  const int pieces = ((int)a.k + 31) / 32 * 4, end = (pieces + 31) / 32 * 32;
  float v[8], more[8], inverse = 1.f;
  if (a.x_kind != 2) load8(a, row, threadIdx.x, v);
  if (a.norm_on) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    for (int at = threadIdx.x + 512; at < pieces; at += 512) {
      load8(a, row, at, more);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(more[i], more[i], sum);
    }
    inverse = inverse_rms(sum, (int)a.k, (float)a.eps, room);
  }
  for (int at = threadIdx.x; at < end; at += 512) {
    const bool in = at < pieces;
    int z[8];
    float scale = 0.f, sum = 0.f;
    if (a.x_kind == 2) {
      for (int i = 0; i < 8; ++i) z[i] = 0;
      if (in) scale = bytes8(a, row, at, z);
    } else {
      if (at >= 512) load8(a, row, at, v);
      if (a.norm_on) {
        if (at >= 512) weights8(a, at, more);
        scale8(a, inverse, at < 512 ? w : more, v);
      }
      if constexpr (FORMAT == 16) {
        if (in) place_bf16(v, at, t, x);
        continue;
      }
      scale = whole_numbers(v, x.digits, z);
      if (x.digits > 1)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i];
    }
    if (x.digits == 1)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += scale * (float)z[i];
    place_bytes<FORMAT>(z, scale, sum, at, t, tokens, in, x);
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
  SHARED_BYTES(shared);
  let_others_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int nblk = ((int)a.k + 31) / 32, span = (int)a.span, halves = a.act ? 2 : 1;
  const int share = (nblk + WARPS - 1) / WARPS, from = warp * share;
  const int mine = nblk - from < share ? nblk - from : share, pieces = (share + span - 1) / span;
  const int slot_bytes = span * BLOCK<FORMAT>;
  char* ring = shared + warp * DEPTH * slot_bytes;
  // where copying stands
  i64 tile = blockIdx.x;
  int half = 0, piece = 0;
  auto copy_next = [&](int slot) {
    if (tile < a.tiles) {
      const int left = mine - piece * span, count = left < span ? left : span;
      if (count > 0)
        fetch<FORMAT>(ring + slot * slot_bytes, a, tile + half * a.second, nblk, from + piece * span, count, span, lane);
      if (++piece == pieces) {
        piece = 0;
        if (++half == halves) { half = 0; tile += gridDim.x; }
      }
    }
    copies_end();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) copy_next(i);
  if (warp == 0 && lane < a.ahead * halves) {  // behind what the ring has
    const i64 held = DEPTH / (pieces * halves), which = held + lane / halves;
    const i64 next = blockIdx.x + which * (i64)gridDim.x, size = FORMAT == 16 ? a.k * 32 : group_bytes(nblk, FORMAT);
    if (next < a.tiles && (next + 1) * 16 <= a.n) to_cache(a.w + (next + lane % halves * a.second) * size, size);
  }
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
  x.scales = (float*)(x.values + (i64)nblk * x.count * (FORMAT == 16 ? 64 : 32));
  x.sums = x.scales + (FORMAT == 16 ? 0 : nblk * tokens);
  float* kept = x.sums + (FORMAT == 5 ? nblk * x.count : 0);  // [cell]: gates
  float* parts = kept + 16 * tokens;                          // [1 or 2][cell][PITCH]
  const int buffer = tokens <= 4 ? 16 * tokens * PITCH : 0;
  for (int t = 0; t < tokens; ++t) stage<FORMAT>(a, first + t, t, tokens, w, x, parts);
  __syncthreads();
  const int shift = x.digits == 4 ? 2 : x.digits == 2 ? 1 : 0;
  const int cell = threadIdx.x >> 4, lead = (threadIdx.x & 15) == 0;
  int slot = 0, turn = 0;
  for (i64 at = blockIdx.x; at < a.tiles; at += gridDim.x) {
    for (int h = 0; h < halves; ++h, turn ^= 1) {
      float sums[NT][4];
#pragma unroll
      for (int t = 0; t < NT; ++t) for (int i = 0; i < 4; ++i) sums[t][i] = 0.f;
      for (int p = 0; p < pieces; ++p) {
        const int rest = mine - p * span, count = rest < span ? rest : span;
        copies_but<DEPTH - 1>();
        __syncwarp();
        const char* here = ring + slot * slot_bytes;
#pragma unroll 4
        for (int b = 0; b < count; ++b)
          multiply<FORMAT, NT>(here, b, from + p * span + b, span, x, tokens, shift, lane, sums);
        __syncwarp();
        copy_next(slot);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
      }
      float* mine_parts = parts + turn * buffer;
      hand_over<FORMAT, NT>(mine_parts, sums, x.digits, tokens, lane, warp);
      const bool last = h + 1 == halves;
      const i64 channel = at * 16 + (cell & 15);
      float more = 0.f;  // on its way while the others get here
      if (lead && last && cell < 16 * tokens && channel < a.n) more = addend(a, first + (cell >> 4), channel);
      __syncthreads();
      for (int c = cell; c < 16 * tokens; c += 32) {
        float v = mine_parts[c * PITCH + (threadIdx.x & 15)];
        for (int o = 8; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
        if (!lead || channel >= a.n) continue;
        const i64 token = first + (c >> 4);
        if (c != cell) more = addend(a, token, channel);
        if (!last) kept[c] = v;
        else write_result(a, token, channel, __fadd_rn(a.act ? __fmul_rn(activated(kept[c], (int)a.act), v) : v, more));
      }
      if (!buffer) __syncthreads();
    }
  }
}

#define LINEAR(name, format, nt, depth, blocks) \
  extern "C" __global__ void __launch_bounds__(512, blocks) name(LinearArgs a) { linear<format, nt, depth>(a); }

LINEAR(linear_q4_1, 4, 1, 2, 2)
LINEAR(linear_q4_2, 4, 2, 2, 1)
LINEAR(linear_q4_4, 4, 4, 2, 1)
LINEAR(linear_q4m_1, 5, 1, 2, 2)
LINEAR(linear_q4m_2, 5, 2, 2, 1)
LINEAR(linear_q4m_4, 5, 4, 2, 1)
LINEAR(linear_q8_1, 8, 1, 2, 2)
LINEAR(linear_q8_2, 8, 2, 2, 1)
LINEAR(linear_q8_4, 8, 4, 2, 1)
LINEAR(linear_bf16_1, 16, 1, 2, 2)
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

extern "C" __global__ void unpack(UnpackArgs a) {
  let_others_start();
  after_others();
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const int nblk = ((int)a.k + 31) / 32;
  const i64 size = (i64)nblk * (a.format == 8 ? 544 : a.format == 5 ? 320 : 288);
  const i64 pieces = (a.k + 7) / 8, all = (a.n + 15) / 16 * 16 * pieces;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < all; i += (i64)gridDim.x * blockDim.x) {
    // neighbouring threads take neighbouring rows of a group: their bytes lie side by side
    const i64 r = i % 16, piece = i / 16 % pieces, g = i / 16 / pieces;
    const i64 row = g * 16 + r;
    if (row >= a.n) continue;
    for (int e = 0; e < 8; ++e) {
      const i64 k = piece * 8 + e;
      if (k < a.k) a.y[row * a.k + k] = (u16)bf16_of(unpacked(w + g * size, nblk, (int)r, k, (int)a.format));
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
