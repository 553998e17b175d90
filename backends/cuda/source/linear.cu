// y = x·wᵀ (+ bias) (+ residual) for few tokens, on tensor cores, at the pace at which weights can be read.
//
// A block makes 32 output channels at a time, two row groups (bf16: 16). One warp copies weights into a ring of slots
// in shared memory; 16 warps multiply, warp w the blocks w, w+16, … of 32 inputs; one to three add up their sums, in order,
// while they are at the next tile. The ring fills while the kernel before ends.
//
// Quantised weights meet x as whole numbers: a block of 32 activations has one scale, a power of two for which
// they become whole numbers of 31 bits or (two digits) 15 bits, and these are columns of signed bytes: one, two
// or four a token. So sums of 32 products are exact, and only they are rounded, in f32. One column is
// "act=i8/32". bf16 weights meet x as three columns of bf16, whose sum is the f32 value, or as one.
//
// With `act`, channel c of a tile's two groups are gate and up: y = act(gate)·up.
// With `norm_on`, x is first divided by its root mean square and multiplied by offset + norm.
//
// Blocks make columns of few tokens themselves, each for itself; of more, a kernel in front makes them once, as they lie
// in a block's shared memory.

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
  i64 span;              // blocks of 32 inputs in one slot of the ring, a multiple of 16
  i64 slot_bytes, depth; // of the ring
  char* columns;         // x as columns, `piece` bytes for each block's tokens; 0: blocks make them
  i64 piece;
  i64 begin;             // the first token of this launch
};

// Products of the same tokens, one after the other: each takes what the one before it made, or nothing of this kernel's.
constexpr int JOINED = 8;

struct ChainArgs {
  i64 count;
  u32* door;              // of more than one: a word whose low bits are 0 before and after
  LinearArgs parts[JOINED];
};

constexpr int WARPS = 16;         // that multiply; behind them one that copies, and those that finish

// Warps that finish, and the tokens that each adds up at a time. One token is through sooner with little code.
template <int NT>
constexpr int FINISHERS = NT == 1 ? 1 : 3;
template <int NT>
constexpr int SOME = NT == 1 ? 1 : 4;

constexpr int PITCH = WARPS + 1;  // of partial sums: neighbouring cells lie in different banks

// Row groups that a block of threads makes at a time.
template <int FORMAT>
constexpr int GROUPS = FORMAT == 16 ? 1 : 2;

// What all blocks of a kernel wait at for each other, so they have to run at the same time: a word whose upper half counts
// rounds, in each of which all arrive once, and whose lower half counts arrivals, and is 0 between rounds.
struct Door {
  u32* word;  // 0: of a thread that doesn't wait
  u32 begun;  // the upper half, before any thread of this block arrives for the first time

  __device__ __forceinline__ explicit Door(u32* word) : word(word), begun(word ? word_now(word) >> 16 : 0) {}
  // Until so many rounds are through.
  __device__ __forceinline__ void wait(int rounds) const {
    if (!word) return;
    while ((short)((word_now(word) >> 16) - begun - rounds) < 0) {}
  }
};

// One of so many arrivals, which are one thread's `first` and the others'.
__device__ __forceinline__ void arrive_at(u32* door, bool first, int arrivals) {
  add_behind(door, first ? 0x10001u - arrivals : 1u);
}

constexpr int SUMS = 2;  // sets of the warps' sums: one is added up while the next comes

__device__ __forceinline__ int ring_bytes(int slot_bytes, int depth) { return HEAD + depth * slot_bytes; }

// Sets up what a block's warps hand each other, by all of its threads: the ring of weights, and barriers for a ring of
// sums, whose place depends on the product. finishers: warps that empty those.
__device__ __forceinline__ Ring ring_at(char* shared, int slot_bytes, int depth, int finishers = 1) {
  const Ring ring{shared + HEAD, (u64*)shared, (u64*)shared + 8, slot_bytes, depth};
  u64* sums = (u64*)shared + 16;
  if ((int)threadIdx.x < depth) {
    barrier_make(ring.full + threadIdx.x, FILLERS);
    barrier_make(ring.empty + threadIdx.x, WARPS);
    if (threadIdx.x == 0) barrier_make(sums + 2 * SUMS, 1);  // columns
    barriers_made();
  }
  if (threadIdx.x < SUMS) {
    barrier_make(sums + threadIdx.x, WARPS);
    barrier_make(sums + SUMS + threadIdx.x, finishers);
  }
  __syncthreads();
  return ring;
}

// bf16: bytes from row to row of a slot: rows lie in different banks.
__device__ __forceinline__ int row_pitch(int span) { return span * 64 + 64; }

// Begins to fill a slot of the ring with `count` blocks of 32 inputs, from block b on, of a tile. group: its first rows;
// second: groups from those to its second ones; last: row of w.
template <int FORMAT>
__device__ __forceinline__ void fill_slot(
    char* slot, u64* full, const char* w, int group, int second, int last, int k, int b, int count, int span,
    int lane) {
  constexpr int U = GROUPS<FORMAT>, PARTS = FORMAT == 5 ? 3 : 2;  // quants, scales, minima
  constexpr int PIECES = FORMAT == 16 ? 16 : U * PARTS;
  const int nblk = (k + 31) / 32;
  // piece i: where from, where to, bytes
  auto piece = [&](int i, char*& to, const char*& from) {
    if constexpr (FORMAT == 16) {
      const int row = group * 16 + i;
      to = slot + i * row_pitch(span);
      from = w + ((i64)(row < last ? row : last) * k + b * 32) * 2;
      return count * 64;
    } else {
      const int u = i >= PARTS ? 1 : 0, part = i - u * PARTS, here = group + u * second;
      const int before = part ? QUANTS<FORMAT> + (part - 1) * 32 : 0, each = part ? 32 : QUANTS<FORMAT>;
      to = slot + span * (u * BLOCK<FORMAT> + before);
      from = w + group_bytes(nblk, FORMAT) * (here < last / 16 ? here : last / 16) + (i64)nblk * before + b * each;
      return count * each;
    }
  };
#ifdef BULK
  if (lane == 0) barrier_expect(full, U * count * BLOCK<FORMAT>);
  __syncwarp();
  if (lane < PIECES) {
    char* to;
    const char* from;
    const int bytes = piece(lane, to, from);
    bulk_ahead(to, from, bytes, full);
  }
#else
  for (int i = 0; i < PIECES; ++i) {
    char* to;
    const char* from;
    const int bytes = piece(i, to, from);
    for (int c = lane * 16; c < bytes; c += 512) copy_ahead(to + c, from + c, true);
  }
  barrier_copied(full);
#endif
}

// What the copying warp does: fills slot after slot, in the order in which they are used.
template <int FORMAT>
__device__ __forceinline__ void feed(const LinearArgs& a, const Ring& ring, Turn& turn, int lane) {
  constexpr int U = GROUPS<FORMAT>;
  const int k = (int)a.k, nblk = (k + 31) / 32, span = (int)a.span, last = (int)a.n * (a.act ? 2 : 1) - 1;
  const int apart = a.act ? 1 : U, halves = a.act && U == 1 ? 2 : 1;  // bf16: gate and up one after the other
  const int tiles = (int)a.tiles, second = (int)a.second;
  const char* w = a.w;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    for (int half = 0; half < halves; ++half)
      for (int b = 0; b < nblk; b += span) {
        const int count = nblk - b < span ? nblk - b : span;
        char* slot = ring.slots + turn.slot * ring.slot_bytes;
        barrier_wait(ring.empty + turn.slot, turn.parity ^ 1);
        fill_slot<FORMAT>(
            slot, ring.full + turn.slot, w, tile * apart + half * second, second, last, k, b, count, span, lane);
        turn.next(ring.depth);
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

// Where a thread finds its part of a block's columns of x, and of its weights in a slot. Columns that nobody has are
// read all the same: what comes of them is nobody's sum.
template <int FORMAT, int NT>
struct Part {
  const char* values;
  const float *first, *second;        // scales of its two columns' tokens
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

// What a lane holds of a block of 32 inputs: weights of U row groups, with scales and minima of its two rows in each,
// and columns of x with their scales and sums. ONE: a token has one column, else two neighbours are one token's.
template <int FORMAT, int NT, bool ONE>
struct Held {
  static constexpr int U = GROUPS<FORMAT>;
  uint4 w[U];  // q8: four words; bf16: row g
  uint4 more;  // bf16: row g+8
  u32 scales[U], minima[U];
  uint4 x[NT];
  float s[NT], r[NT], sum[NT], next_sum[NT];

  // slot: the lane's first byte of this block in the slot; i: which of the warp's blocks of it this is
  __device__ __forceinline__ void load(
      const char* quants, const char* scale, int span, const Part<FORMAT, NT>& p, int i, int count, int tokens, int shift) {
    const int at = 16 * i;
    if constexpr (FORMAT == 16) {
      w[0] = *(const uint4*)(quants + at * 64);
      more = *(const uint4*)(quants + at * 64 + 8 * row_pitch(span));
#pragma unroll
      for (int t = 0; t < NT; ++t) x[t] = *(const uint4*)(p.values + at * count * 64 + p.offset[t]);
    } else {
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint2 both = *(const uint2*)(p.values + at * count * 32 + t * 256);
        x[t].x = both.x; x[t].y = both.y;
        s[t] = p.first[at * tokens + (t * 8 >> shift)];
        if (ONE) r[t] = p.second[at * tokens + t * 8];
        if constexpr (FORMAT == 5) {
          sum[t] = p.sums[at * count + t * 8];
          if (ONE) next_sum[t] = p.sums[at * count + t * 8 + 1];
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const char* from = quants + u * span * BLOCK<FORMAT> + at * QUANTS<FORMAT>;
        const uint2 v = *(const uint2*)from;
        w[u].x = v.x; w[u].y = v.y;
        if constexpr (FORMAT == 8) {
          const uint2 behind = *(const uint2*)(from + 256);
          w[u].z = behind.x; w[u].w = behind.y;
        }
        const char* per_block = scale + u * span * BLOCK<FORMAT> + at * 32;
        scales[u] = *(const u32*)per_block;
        if constexpr (FORMAT == 5) minima[u] = *(const u32*)(per_block + span * 32);
      }
    }
  }

  // The whole-number products d[group][tile of columns][4]: rows 2g and 2g+1, two columns each.
  __device__ __forceinline__ void whole(int (*d)[NT][4]) const {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      u32 a0 = w[u].x, a1 = w[u].y, a2 = w[u].z, a3 = w[u].w;
      if constexpr (FORMAT == 4) {
        a2 = less_eight(a0); a3 = less_eight(a1);
        a0 = less_eight(a0 << 4); a1 = less_eight(a1 << 4);
      } else if constexpr (FORMAT == 5) {
        a2 = a0 >> 4 & 0x0f0f0f0fu; a3 = a1 >> 4 & 0x0f0f0f0fu;
        a0 &= 0x0f0f0f0fu; a1 &= 0x0f0f0f0fu;
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) mma_bytes(d[u][t], a0, a1, a2, a3, x[t].x, x[t].y, ONE ? 0x4b400000 : 0);
    }
  }

  // Adds them, scaled, to sums[group][tile of columns][4]. ONE: row 2g of columns 2j and 2j+1, then row 2g+1; else the
  // rows' sums over both columns, the second 256 times, in places 0 and 2.
  __device__ __forceinline__ void add(int (*whole)[NT][4], float (*sums)[NT][4]) const {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const float low = half_to_float((u16)scales[u]), high = half_to_float((u16)(scales[u] >> 16));
      float least = 0.f, most = 0.f;
      if constexpr (FORMAT == 5) { least = half_to_float((u16)minima[u]); most = half_to_float((u16)(minima[u] >> 16)); }
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        float* to = sums[u][t];
        const int* d = whole[u][t];
        if (ONE) {
          to[0] = __fmaf_rn(__fmul_rn(low, s[t]), __int_as_float(d[0]) - MAGIC, to[0]);
          to[1] = __fmaf_rn(__fmul_rn(low, r[t]), __int_as_float(d[1]) - MAGIC, to[1]);
          to[2] = __fmaf_rn(__fmul_rn(high, s[t]), __int_as_float(d[2]) - MAGIC, to[2]);
          to[3] = __fmaf_rn(__fmul_rn(high, r[t]), __int_as_float(d[3]) - MAGIC, to[3]);
          if constexpr (FORMAT == 5) {
            to[0] = __fmaf_rn(least, sum[t], to[0]);
            to[1] = __fmaf_rn(least, next_sum[t], to[1]);
            to[2] = __fmaf_rn(most, sum[t], to[2]);
            to[3] = __fmaf_rn(most, next_sum[t], to[3]);
          }
        } else {
          to[0] = __fmaf_rn(__fmul_rn(low, s[t]), (float)(d[0] + 256 * d[1]), to[0]);
          to[2] = __fmaf_rn(__fmul_rn(high, s[t]), (float)(d[2] + 256 * d[3]), to[2]);
          if constexpr (FORMAT == 5) {
            to[0] = __fmaf_rn(least, sum[t], to[0]);
            to[2] = __fmaf_rn(most, sum[t], to[2]);
          }
        }
      }
    }
  }

  // bf16: rows g and g+8 of two columns.
  __device__ __forceinline__ void multiply(float (*sums)[NT][4]) const {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      mma(sums[0][t], w[0].x, more.x, w[0].y, more.y, x[t].x, x[t].y);
      mma(sums[0][t], w[0].z, more.z, w[0].w, more.w, x[t].z, x[t].w);
    }
  }
};

// Some of a warp's blocks in a slot, AT_ONCE of them: all loads first, then all products.
template <int FORMAT, int NT, bool ONE, int AT_ONCE>
__device__ __forceinline__ void blocks(
    const char* quants, const char* scale, int span, const Part<FORMAT, NT>& p, int i, int count, int tokens, int shift,
    float (*sums)[NT][4]) {
  constexpr int U = GROUPS<FORMAT>;
  Held<FORMAT, NT, ONE> held[AT_ONCE];
#pragma unroll
  for (int e = 0; e < AT_ONCE; ++e) held[e].load(quants, scale, span, p, i + e, count, tokens, shift);
  if constexpr (FORMAT == 16) {
#pragma unroll
    for (int e = 0; e < AT_ONCE; ++e) held[e].multiply(sums);
  } else {
    int d[AT_ONCE][U][NT][4];
#pragma unroll
    for (int e = 0; e < AT_ONCE; ++e) held[e].whole(d[e]);
#pragma unroll
    for (int e = 0; e < AT_ONCE; ++e) held[e].add(d[e], sums);
  }
}

// A token's activations. easy: pieces of eight lie side by side, aligned.
struct Token {
  const char* x;
  int kind, k;  // as in LinearArgs
  bool easy;
};

__device__ __forceinline__ Token token_of(const LinearArgs& a, i64 row) {
  const int item = a.x_kind == 0 ? 4 : a.x_kind == 1 ? 2 : 1;
  const bool easy = !((a.k & 7) | (((i64)a.x | a.x_stride * item) & 15));
  return {(const char*)a.x + row * a.x_stride * item, (int)a.x_kind, (int)a.k, easy};
}

// Four activations from `at` on, one by one; zeros beyond k.
__device__ __noinline__ float4 one_by_one(const char* x, int kind, int at, int k) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = at + i >= k ? 0.f : kind ? float_of(((const u16*)x)[at + i]) : ((const float*)x)[at + i];
  return float4{v[0], v[1], v[2], v[3]};
}

// Piece `at`, eight activations; zeros beyond k.
__device__ __forceinline__ void load8(const Token& t, int at, float* v) {
  if (t.easy && t.kind) {
    const uint4 p = 8 * at < t.k ? *(const uint4*)(t.x + at * 16) : make_uint4(0, 0, 0, 0);
    v[0] = float_of(p.x & 0xffff); v[2] = float_of(p.y & 0xffff); v[4] = float_of(p.z & 0xffff); v[6] = float_of(p.w & 0xffff);
    v[1] = float_of(p.x >> 16); v[3] = float_of(p.y >> 16); v[5] = float_of(p.z >> 16); v[7] = float_of(p.w >> 16);
    return;
  }
  float4 p = {0.f, 0.f, 0.f, 0.f}, q = p;
  if (!t.easy) {
    p = one_by_one(t.x, t.kind, 8 * at, t.k);
    q = one_by_one(t.x, t.kind, 8 * at + 4, t.k);
  } else if (8 * at < t.k) {
    p = *(const float4*)(t.x + at * 32);
    q = *(const float4*)(t.x + at * 32 + 16);
  }
  v[0] = p.x; v[1] = p.y; v[2] = p.z; v[3] = p.w; v[4] = q.x; v[5] = q.y; v[6] = q.z; v[7] = q.w;
}

// What a piece is multiplied by when it is normalised.
__device__ __forceinline__ void weights8(const LinearArgs& a, int at, float* w) {
  const int k = a.norm ? (int)a.k : 0;
  load8({(const char*)a.norm, 0, k, !((k & 7) | ((i64)a.norm & 15))}, at, w);
}

__device__ __forceinline__ void scale8(const LinearArgs& a, float inverse, const float* w, float* v) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = __fmul_rn(v[i], inverse);
    if (a.norm) v[i] = __fmul_rn(v[i], __fadd_rn((float)a.offset, w[i]));
  }
}

// Two values as three pairs of bf16 whose sums they are.
__device__ __forceinline__ void split(float v, float w, u32* parts) {
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    parts[d] = pair_of(v, w);
    const float near = float_of(parts[d] & 0xffff), far = float_of(parts[d] >> 16);
    v = fabsf(near) < INFINITE ? v - near : 0.f;
    w = fabsf(far) < INFINITE ? w - far : 0.f;
  }
}

__device__ __forceinline__ void place_bf16(const float* v, int at, int t, const Columns& x) {
  u32 c[4][3];
#pragma unroll
  for (int i = 0; i < 4; ++i) split(v[2 * i], v[2 * i + 1], c[i]);
  uint4* to = (uint4*)x.values + (i64)((at >> 2) * x.count + t * x.digits) * 4 + (at & 3);
#pragma unroll
  for (int d = 0; d < 3; ++d)
    if (d < x.digits) to[4 * d] = make_uint4(c[0][d], c[1][d], c[2][d], c[3][d]);
}

// Four words' bytes number d side by side, for each d.
__device__ __forceinline__ void transpose(const int* z, u32* out) {
  const u32 a = bytes_of(z[0], z[1], 0x5140), b = bytes_of(z[2], z[3], 0x5140);
  const u32 c = bytes_of(z[0], z[1], 0x7362), d = bytes_of(z[2], z[3], 0x7362);
  out[0] = bytes_of(a, b, 0x5410); out[1] = bytes_of(a, b, 0x7632);
  out[2] = bytes_of(c, d, 0x5410); out[3] = bytes_of(c, d, 0x7632);
}

// The whole numbers of eight activations and their scale; four neighbouring lanes have a block of 32. ONE: one digit,
// else two, for "act=bf16", or four.
template <bool ONE>
__device__ __forceinline__ float whole_numbers(float* v, int digits, int* z) {
  if (!ONE && digits == 2)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const u32 both = pair_of(v[i], v[i + 1]);
      v[i] = float_of(both & 0xffff);
      v[i + 1] = float_of(both >> 16);
    }
  u32 bits = 0;  // of the largest, without signs: they order floats, and NaN above all
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 own = __float_as_uint(v[i]) & 0x7fffffffu;
    bits = own > bits ? own : bits;
  }
#pragma unroll
  for (int o = 1; o < 4; o <<= 1) {
    const u32 other = __shfl_xor_sync(0xffffffffu, bits, o);
    bits = other > bits ? other : bits;
  }
  if (bits >= 0x7f800000u) {
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = 0;
    return __int_as_float(0x7fc00000);
  }
  if (ONE) {
    const float scale = __fdiv_rn(__uint_as_float(bits), 127.f), by = scale == 0.f ? 1.f : scale;
    const float inverse = __fdiv_rn(1.f, by);
    // v·(1/by) is less than 2e-5 off the rounded quotient v/by, so only next to halves need it be divided
    bool sure = by >= 1.1754944e-38f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float q = __fmul_rn(v[i], inverse), whole = __fadd_rn(q, MAGIC);
      z[i] = (int)__float_as_uint(whole) - 0x4b400000;
      sure = sure && fabsf(fabsf(q - (whole - MAGIC)) - 0.5f) > 2e-5f;
    }
    if (!sure)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int q = __float2int_rn(__fdiv_rn(v[i], by));
        z[i] = q > 127 ? 127 : q < -127 ? -127 : q;
      }
    return scale;
  }
  int power = (digits == 4 ? 283 : 267) - (int)(bits >> 23);  // 2^(29 or 13 − exponent), biased
  power = power < 253 ? power : 253;
  const float by = __int_as_float(power << 23);
  const int half = digits == 4 ? 0x00808080 : 0x80;
#pragma unroll
  for (int i = 0; i < 8; ++i) z[i] = (__float2int_rn(__fmul_rn(v[i], by)) + half) ^ half;
  return __int_as_float((254 - power) << 23);
}

// Four words, of which word `by` becomes the first, and so on.
__device__ __forceinline__ void rotate(u32* v, int by) {
  const u32 a = v[0], b = v[1], c = v[2], d = v[3];
  const bool odd = by & 1, two = by & 2;
  const u32 p = odd ? b : a, q = odd ? c : b, r = odd ? d : c, s = odd ? a : d;
  v[0] = two ? r : p; v[1] = two ? s : q; v[2] = two ? p : r; v[3] = two ? q : s;
}

// Whole numbers z with their scale and, for q4m, the sum of what they stand for.
template <int FORMAT, bool ONE>
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
  char* to = x.values + (b * x.count + t * x.digits) * 32;
  // four digits: neighbours begin with different ones, which lie in different banks
  const int begin = !ONE && x.digits == 4 ? b & 3 : 0;
  if (!ONE) { rotate(low, begin); rotate(high, begin); }
#pragma unroll
  for (int i = 0; i < (ONE ? 1 : 4); ++i)
    if (i < x.digits) {
      const int d = i + begin & 3;
      if (FORMAT == 8) {  // a lane meets fours j and j+4, as a q8 block has them; else 2j and 2j+1
        *(u32*)(to + d * 32 + (2 * j & 3) * 8 + (j >> 1) * 4) = low[i];
        *(u32*)(to + d * 32 + (2 * j + 1 & 3) * 8 + (j >> 1) * 4) = high[i];
      } else {
        *(uint2*)(to + d * 32 + j * 8) = make_uint2(low[i], high[i]);
      }
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

// x of a token as columns. w: what the thread's first piece is multiplied by. ONE: as bytes, which it may be already. A
// piece is on its way while the one before is placed.
template <int FORMAT, bool ONE>
__device__ __forceinline__ void stage(
    const LinearArgs& a, i64 row, int t, int tokens, const float* w, const Columns& x, float* room) {
  const int pieces = ((int)a.k + 31) / 32 * 4, end = (pieces + 31) / 32 * 32, mine = threadIdx.x;
  float v[8], next[8], by[8], inverse = 1.f;
  const bool floats = !ONE || a.x_kind != 2;
  const Token token = token_of(a, row);
  if (floats) load8(token, mine, v);
  if (a.norm_on) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
#pragma unroll 1
    for (int at = mine + 512; at < pieces; at += 512) {
      load8(token, at, next);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(next[i], next[i], sum);
    }
    inverse = inverse_rms(sum, (int)a.k, (float)a.eps, room);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) by[i] = w[i];
#pragma unroll 1
  for (int at = mine; at < end; at += 512) {
    const bool in = at < pieces;
    int z[8];
    float scale = 0.f, sum = 0.f;
    if (floats) {
      load8(token, at + 512, next);
      if (a.norm_on) scale8(a, inverse, by, v);
      if constexpr (FORMAT == 16) {
        if (in) place_bf16(v, at, t, x);
      } else {
        scale = whole_numbers<ONE>(v, x.digits, z);
        if (FORMAT == 5 && !ONE)
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
      if (FORMAT == 5 && ONE)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += scale * (float)z[i];
      place_bytes<FORMAT, ONE>(z, scale, sum, at, t, tokens, in, x);
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
      first = by * s[0];
      second = by * s[2];
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

// Where a product's columns of x lie in shared memory, and behind them the warps' sums.
template <int FORMAT>
struct Layout {
  Columns x;
  float* kept;   // [cell]: gates, bf16
  float* parts;  // [sets][group][cell][PITCH]
  int cells, set, sets, bytes;  // bytes: of the columns

  __device__ __forceinline__ Layout(const LinearArgs& a, int tokens, char* room) {
    const int nblk = ((int)a.k + 31) / 32;
    x.digits = FORMAT == 16 && a.digits > 1 ? 3 : (int)a.digits;
    x.count = tokens * x.digits;
    x.values = room;
    x.scales = (float*)(x.values + nblk * x.count * (FORMAT == 16 ? 64 : 32));
    x.sums = x.scales + (FORMAT == 16 ? 0 : nblk * tokens);
    cells = 16 * tokens;
    set = GROUPS<FORMAT> * cells * PITCH;
    sets = a.tokens <= 8 ? SUMS : 1;  // as the memory was sized, also where a block has fewer tokens
    kept = x.sums + (FORMAT == 5 ? nblk * x.count : 0);
    parts = kept + (GROUPS<FORMAT> == 1 ? cells : 0);
    bytes = (int)((char*)kept - room);
  }
};

// Copies columns into shared memory, in whole 16 bytes, by the warps that multiply.
__device__ __forceinline__ void fetch(char* to, const char* from, int bytes, u64* there) {
  bytes = (bytes + 15) & ~15;
#ifdef BULK
  if (threadIdx.x == 0) {
    barrier_expect(there, bytes);
    bulk_ahead(to, from, bytes, there);
  }
  barrier_wait(there, 0);
#else
  for (int c = threadIdx.x * 16; c < bytes; c += 512 * 16) copy_ahead(to + c, from + c, true);
  copies_end();
  copies_but<0>();
  meet(0, 512);
#endif
}

// A multiplying warp's part of a tile: its sums, handed over.
template <int FORMAT, int NT, bool ONE>
__device__ __forceinline__ void multiply_tile(
    const Layout<FORMAT>& here, int nblk, int span, int tokens, const Ring& ring, Turn& turn, Turn& given) {
  constexpr int U = GROUPS<FORMAT>, AT_ONCE = NT == 1 ? 4 : NT == 2 ? 2 : 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Columns& x = here.x;
  u64* full = ring.full + 16;
  const int shift = x.digits == 4 ? 2 : x.digits == 2 ? 1 : 0;
  // the lane's first bytes of its warp's first block in a slot
  const int quants = FORMAT == 16 ? (lane >> 2) * row_pitch(span) + warp * 64 + (lane & 3) * 16
                                  : warp * QUANTS<FORMAT> + (lane & 3) * 64 + (lane >> 2) * 8;
  const int scales = FORMAT == 16 ? 0 : span * QUANTS<FORMAT> + warp * 32 + (lane >> 2) * 4;
  float sums[U][NT][4];
#pragma unroll
  for (int i = 0; i < U * NT * 4; ++i) (&sums[0][0][0])[i] = 0.f;
  for (int b = 0; b < nblk; b += span) {
    const int left = (nblk - b < span ? nblk - b : span) - warp, mine = (left + 15) >> 4;
    const Part<FORMAT, NT> part = part_of<FORMAT, NT>(x, tokens, shift, b + warp, lane);
    const char* slot = ring.slots + turn.slot * ring.slot_bytes;
    barrier_wait(ring.full + turn.slot, turn.parity);
    int i = 0;
    for (; i + AT_ONCE <= mine; i += AT_ONCE)
      blocks<FORMAT, NT, ONE, AT_ONCE>(slot + quants, slot + scales, span, part, i, x.count, tokens, shift, sums);
    if constexpr (AT_ONCE > 1)
      for (; i < mine; ++i)
        blocks<FORMAT, NT, ONE, 1>(slot + quants, slot + scales, span, part, i, x.count, tokens, shift, sums);
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + turn.slot);
    turn.next(ring.depth);
  }
  barrier_wait(full + SUMS + given.slot, given.parity ^ 1);
  float* set = here.parts + given.slot * here.set;
#pragma unroll
  for (int u = 0; u < U; ++u)
    hand_over<FORMAT, NT>(set + u * here.cells * PITCH, sums[u], x.digits, tokens, lane, warp);
  __syncwarp();
  if (lane == 0) barrier_arrive(full + given.slot);
  given.next(here.sets);
}

// What the multiplying warps do for all products. room: shared memory for x and sums.
template <int FORMAT, int NT, bool ONE>
__device__ __forceinline__ void multiply_all(
    const ChainArgs& all, i64 first, int tokens, const Ring& ring, char* room, const Door& door) {
  const int count = (int)all.count;
  Turn turn, given;
  for (int part = 0; part < count; ++part) {
    const LinearArgs& a = all.parts[part];
    const int nblk = ((int)a.k + 31) / 32, span = (int)a.span, tiles = (int)a.tiles;
    const int halves = a.act && GROUPS<FORMAT> == 1 ? 2 : 1;
    float w[8];
    if (a.norm_on && !a.columns) weights8(a, threadIdx.x, w);
    if (part) {
      door.wait(part);
      meet(0, 512);
    } else {
      after_others();
    }
    const Layout<FORMAT> here(a, tokens, room);
    if (a.columns) {
      fetch(room, a.columns + blockIdx.y * a.piece, here.bytes, ring.full + 16 + 2 * SUMS);
    } else {
      for (int t = 0; t < tokens; ++t) stage<FORMAT, ONE>(a, first + t, t, tokens, w, here.x, here.parts);
      meet(0, 512);
    }
    for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
      // not sooner: the next kernel's blocks would crowd where this one's end first
      if (at + gridDim.x >= tiles && part == count - 1) let_others_start();
      for (int h = 0; h < halves; ++h) multiply_tile<FORMAT, NT, ONE>(here, nblk, span, tokens, ring, turn, given);
    }
  }
}

// What the last warps do: add up, in order, what the others have for an output, and write it. mine: which of them this is.
template <int FORMAT, int NT>
__device__ __forceinline__ void finish(
    const LinearArgs& a, i64 first, int tokens, const Ring& ring, char* room, Turn& given, int lane, int mine) {
  constexpr int U = GROUPS<FORMAT>, MANY = SOME<NT>, STEP = FINISHERS<NT> * (3 - U);  // tokens between two of a lane's
  const int halves = a.act && U == 1 ? 2 : 1, tiles = (int)a.tiles, apart = a.act ? 1 : U;
  const int r = lane & 15, side = lane >> 4;  // side: the group or, with one group, every other token
  const int begin = U == 1 ? 2 * mine + side : mine;
  const bool gated = a.act != 0;
  u64* full = ring.full + 16;
  const Layout<FORMAT> here(a, tokens, room);
  for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
    const i64 channel = (i64)(at * apart + (U == 2 && !gated ? side : 0)) * 16 + r;
    for (int h = 0; h < halves; ++h) {
      const bool last = h + 1 == halves;
      float more[MANY], next[MANY];
      auto addends = [&](float* v, int token) {
#pragma unroll
        for (int e = 0; e < MANY; ++e, token += STEP)
          v[e] = last && channel < a.n && token < tokens ? addend(a, first + token, channel) : 0.f;
      };
      addends(more, begin);
      barrier_wait(full + given.slot, given.parity);
      const float* set = here.parts + given.slot * here.set + (U == 2 ? side * here.cells * PITCH : 0) + r * PITCH;
      for (int t = 0; t < tokens; t += MANY * STEP) {
        addends(next, begin + t + MANY * STEP);
        float v[MANY] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
#pragma unroll
          for (int e = 0; e < MANY; ++e) {
            const int token = begin + t + e * STEP;
            if (token < tokens) v[e] = __fadd_rn(v[e], set[token * 16 * PITCH + w]);
          }
#pragma unroll
        for (int e = 0; e < MANY; ++e) {
          const int token = begin + t + e * STEP, cell = token * 16 + r;
          float sum = v[e];
          const float up = __shfl_xor_sync(0xffffffffu, sum, 16);
          if (token >= tokens || channel >= a.n) continue;
          if (!last) { here.kept[cell] = sum; continue; }
          if (gated && U == 2 && side) continue;
          if (gated) {
            const float gate = U == 2 ? sum : here.kept[cell];
            sum = __fmul_rn(activated(gate, (int)a.act), U == 2 ? up : sum);
          }
          write_result(a, first + token, channel, __fadd_rn(sum, more[e]));
        }
#pragma unroll
        for (int e = 0; e < MANY; ++e) more[e] = next[e];
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(full + SUMS + given.slot);
      given.next(here.sets);
    }
  }
}

template <int FORMAT, int NT>
__device__ __forceinline__ void linear(const ChainArgs& all) {
  SHARED_BYTES(shared);
  const LinearArgs& a = all.parts[0];  // which tokens there are, and how the ring is cut, is the same for all
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (int)all.count;
  const i64 first = a.begin + blockIdx.y * a.tokens, left = from_host(a.rows) - first;
  if (left <= 0) { after_others(); return; }
  // before any thread of the block goes on: a block without a tile may arrive at once
  const Door door(count > 1 && (threadIdx.x == 0 || (warp > WARPS && lane == 0)) ? all.door : (u32*)0);
  const Ring ring = ring_at(shared, (int)a.slot_bytes, (int)a.depth, FINISHERS<NT>);
  const int tokens = (int)(left < a.tokens ? left : a.tokens);
  char* room = shared + ring_bytes(ring.slot_bytes, ring.depth);
  if (warp == WARPS) {
    Turn turn;
    for (int part = 0; part < count; ++part) feed<FORMAT>(all.parts[part], ring, turn, lane);
  } else if (warp > WARPS) {
    Turn given;
    if (a.residual || count > 1) after_others();  // else all it reads comes from the warps that multiply
    for (int part = 0; part < count; ++part) {
      if (part) {
        door.wait(part);
        __syncwarp();
      }
      finish<FORMAT, NT>(all.parts[part], first, tokens, ring, room, given, lane, warp - WARPS - 1);
      __syncwarp();
      if (lane == 0 && part + 1 < count)
        arrive_at(all.door, blockIdx.x == 0 && warp == WARPS + 1, gridDim.x * FINISHERS<NT>);
    }
  } else if (FORMAT != 16 && a.digits == 1) {
    multiply_all<FORMAT, NT, true>(all, first, tokens, ring, room, door);
  } else {
    multiply_all<FORMAT, NT, false>(all, first, tokens, ring, room, door);
  }
}
