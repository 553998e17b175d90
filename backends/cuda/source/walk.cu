// Many operations as one kernel: its blocks, one on each processor, go through a table of them together. Between two
// operations every block waits until all are through with the first; the weights of products that come later are
// copied ahead all the while, so memory has work where a kernel's end and the next one's begin would leave it idle.

constexpr int PRODUCT = 0, ROPE = 1, NORMALISE = 2, MAP = 3, MOVE = 4;  // kinds; 5: attention

struct WalkOp {
  i64 kind;
  i64 x, y, z;  // blocks that the operation has as a kernel of its own; attention: with as many heads as share keys
  union {
    LinearArgs linear;
    RopeArgs rope;
    NormArgs norm;
    MapArgs map;
    CopyArgs move;
    AttentionArgs attention;
    i64 words[26];
  };
};

struct WalkArgs {
  const WalkOp* ops;
  i64 count;
  int* arrived;           // 0 before and after
  i64 slot_bytes, depth;  // of the ring
};

// Attention by four warps for each of the heads that share keys, a page of 16 keys a warp.
template <class Wait>
__device__ __forceinline__ void attend(const WalkOp& op, char* room, int warp, Wait wait) {
  const AttentionArgs& a = op.attention;
  const int subs = (int)(a.heads / op.y), sub = warp >> 2;
  if (sub >= subs) return;
  const int own = 4 * (128 + 4 * ((int)a.dim + 18)) + 16;
  for (i64 n = blockIdx.x; n < op.x * op.y * op.z; n += gridDim.x) {
    const Place here{(u32)(n % op.x), (u32)(n / op.x % op.y) * subs + sub, (u32)(n / (op.x * op.y)),
                     (u32)op.x, (u32)a.heads, (u32)op.z, (int)threadIdx.x & 127, 128, 2 + sub, 1, sub, subs,
                     room, room + 128 * pitch_of(a) + sub * own};
    attention<1, 2>(a, here, [&] { wait(); meet(1, 128 * subs); });
    meet(1, 128 * subs);
  }
}

// ONE: as `Held` has it.
template <int FORMAT, bool ONE>
__device__ __forceinline__ void walk(const WalkArgs& a) {
  SHARED_BYTES(shared);
  constexpr int WORDS = sizeof(WalkOp) / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (int)a.count;
  const Ring ring = ring_at(shared, (int)a.slot_bytes, (int)a.depth);
  WalkOp* held = (WalkOp*)(shared + ring_bytes(ring.slot_bytes, ring.depth));  // two: this operation and the next
  char* room = (char*)held + (2 * sizeof(WalkOp) + 127) / 128 * 128;
  Turn turn, given;
  auto through = [&] {
    __threadfence();
    if (atomicAdd(a.arrived, 1) == count * (int)gridDim.x - 1) *a.arrived = 0;
  };
  auto await = [&](int i) {
    if (i == 0) after_others();
    else if (lane == 0)
      while (counted(a.arrived) < i * (int)gridDim.x) pause();
  };
  auto tokens_of = [&](const LinearArgs& linear) {
    const i64 rows = from_host(linear.rows);
    return (int)(rows < linear.tokens ? rows : linear.tokens);
  };
  if (warp == WARPS) {
    for (int i = 0; i < count; ++i)
      if (a.ops[i].kind == PRODUCT) feed<FORMAT>(a.ops[i].linear, ring, turn, lane);
    return;
  }
  if (warp > WARPS) {
    for (int i = 0; i < count; ++i) {
      if (a.ops[i].kind != PRODUCT) continue;
      const LinearArgs linear = a.ops[i].linear;
      finish<FORMAT>(linear, 0, tokens_of(linear), ring, given, room, lane, [&] { await(i); __syncwarp(); });
      if (lane == 0) through();
    }
    return;
  }
  if (threadIdx.x < WORDS) ((i64*)held)[threadIdx.x] = ((const i64*)a.ops)[threadIdx.x];
  meet(0, 512);
  for (int i = 0; i < count; ++i) {
    const WalkOp& op = held[i & 1];
    if (i + 1 < count && threadIdx.x < WORDS)
      ((i64*)(held + (i + 1 & 1)))[threadIdx.x] = ((const i64*)(a.ops + i + 1))[threadIdx.x];
    auto ready = [&] {
      if (i == 0 || warp == 0) await(i);
      meet(0, 512);
    };
    auto ending = [&] { if (i + 1 == count) let_others_start(); };
    if (op.kind == PRODUCT) {
      product<FORMAT, 1, ONE>(op.linear, 0, tokens_of(op.linear), ring, turn, given, room, ready, ending);
      meet(0, 512);  // all have read `op`
      continue;
    }
    ending();
    switch ((int)op.kind) {
      case ROPE: {
        const i64 many = op.x * op.y, first = (i64)blockIdx.x * 4 + (threadIdx.x >> 7);
        const bool in = first < many && first / op.y < from_host(op.rope.rows);
        const Turned head(op.rope, in ? first / op.y : 0, in ? first % op.y : 0);
        ready();
        if (in) head.run(op.rope, threadIdx.x & 127, 128);
        for (i64 n = first + gridDim.x * 4; n < many; n += (i64)gridDim.x * 4)
          if (n / op.y < from_host(op.rope.rows)) Turned(op.rope, n / op.y, n % op.y).run(op.rope, threadIdx.x & 127, 128);
        break;
      }
      case NORMALISE:
        ready();
        for (i64 n = blockIdx.x; n < op.x * op.y; n += gridDim.x)
          if (n / op.y < from_host(op.norm.rows)) normalise_group(op.norm, n / op.y, n % op.y, (float*)room);
        break;
      case MAP: {
        ready();
        const i64 width = op.map.width, all = from_host(op.map.rows) * width;
        for (i64 n = blockIdx.x * 512 + threadIdx.x; n < all; n += (i64)gridDim.x * 512)
          map_element(op.map, n / width, n % width);
        break;
      }
      case MOVE: {
        ready();
        const i64 words = op.move.words, all = from_host(op.move.rows) * words;
        for (i64 n = blockIdx.x * 512 + threadIdx.x; n < all; n += (i64)gridDim.x * 512)
          move_word(op.move, n / words, n % words);
        break;
      }
      default: attend(op, room, warp, [&] { if (warp == 0) await(i); });
    }
    meet(0, 512);
    if (threadIdx.x == 0) through();
  }
}

#define WALK(name, format, one) \
  extern "C" __global__ void __launch_bounds__(576, 1) walk_##name(WalkArgs a) { walk<format, one>(a); }

WALK(q4, 4, false)
WALK(q4_bytes, 4, true)
WALK(q4m, 5, false)
WALK(q4m_bytes, 5, true)
WALK(q8, 8, false)
WALK(q8_bytes, 8, true)
WALK(bf16, 16, false)
