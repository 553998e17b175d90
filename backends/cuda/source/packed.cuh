// Packed weights, and the ring in shared memory that they come through.

// FORMAT 4: q4, 5: q4m, 8: q8, 16: bf16. Bytes of a row group's block of 32 inputs: quants, then scales.
template <int FORMAT>
constexpr int QUANTS = FORMAT == 16 ? 1024 : FORMAT == 8 ? 512 : 256;
template <int FORMAT>
constexpr int BLOCK = FORMAT == 16 ? 1024 : FORMAT == 8 ? 544 : FORMAT == 5 ? 320 : 288;

__device__ __forceinline__ i64 group_bytes(int nblk, i64 format) {
  return (i64)nblk * (format == 8 ? 544 : format == 5 ? 320 : 288);
}

// Slots in shared memory, one after the other, and for each two barriers, which open when it is full or empty.
struct Ring {
  char* slots;
  u64 *full, *empty;
  int slot_bytes, depth;
};

// A place in a ring: what fills it and what empties it each have one.
struct Turn {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next(int depth) {
    if (++slot == depth) { slot = 0; parity ^= 1; }
  }
};

constexpr int HEAD = 256;  // bytes of shared memory for barriers, in front of a ring

__device__ __forceinline__ u32 pair(u32 a, u32 b) { return a | b << 16; }
