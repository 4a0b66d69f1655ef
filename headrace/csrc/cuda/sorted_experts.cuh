// Products of rows that are sorted by expert: tiles of work, activations, and how sums reach rows. After hopper.cuh.
// Needs of the source: `Call` with ends [EXPERTS], outputs, limit, alpha, up_offset; macros EXPERTS (of `call`, if it is no
// constant) and GATE.

struct Tile {
  int expert, first, last, output;  // rows from `first`, of which those before `last` are there; first output
};

// Tile number `index`, of HEIGHT rows by WIDTH outputs; false beyond the last. All lanes of a warp take part.
template <int HEIGHT, int WIDTH, class Call>
__device__ __forceinline__ bool find_tile(const Call &call, int index, Tile &tile) {
  int across = (call.outputs + WIDTH - 1) / WIDTH;
  int wanted = index / across, lane = threadIdx.x % 32, before = 0;
  tile.output = index % across * WIDTH;
  for (int base = 0; base < EXPERTS; base += 32) {
    int expert = base + lane;
    int end = expert < EXPERTS ? call.ends[expert] : 0;
    int start = expert < EXPERTS && expert > 0 ? call.ends[expert - 1] : 0;
    int tiles = expert < EXPERTS ? (end - start + HEIGHT - 1) / HEIGHT : 0, sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    uint32 beyond = __ballot_sync(~0u, before + sum > wanted);
    if (beyond) {
      int mine = __ffs(beyond) - 1;
      tile.expert = base + mine;
      tile.last = __shfl_sync(~0u, end, mine);
      int skipped = wanted - before - __shfl_sync(~0u, sum - tiles, mine);
      tile.first = __shfl_sync(~0u, start, mine) + skipped * HEIGHT;
      return true;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return false;
}

// Divide an expert's rows evenly among its tiles of at most HEIGHT rows: of 260 two of 130, not 256 and 4.
template <int HEIGHT, class Call>
__device__ __forceinline__ void even_out(const Call &call, Tile &tile) {
  const int start = tile.expert ? call.ends[tile.expert - 1] : 0, count = tile.last - start;
  const int tiles = (count + HEIGHT - 1) / HEIGHT, each = (count + tiles - 1) / tiles;
  tile.first = start + (tile.first - start) / HEIGHT * each;
  tile.last = min(tile.last, tile.first + each);
}

// Activations of float32 sums: GATE 1 silu, 2 gelu_tanh, 3 clamped. A power that is infinite makes them 0, or `gate * up`.
template <class Call>
__device__ __forceinline__ float apply_gate(const Call &call, float gate, float up) {
  constexpr float LOG2_E = 1.4426950408889634f;
#if GATE == 3
  gate = fminf(gate, call.limit);
  up = fminf(fmaxf(up, -call.limit), call.limit) + call.up_offset;
  return gate * invert(1.0f + exp2_fast(call.alpha * -LOG2_E * gate)) * up;
#elif GATE == 2
  float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * (1.0f - invert(exp2_fast(2.0f * LOG2_E * u) + 1.0f)) * up;
#else
  return gate * invert(1.0f + exp2_fast(-LOG2_E * gate)) * up;
#endif
}

// Transposes an 8 x 8 matrix of 16-bit numbers: a lane has two of row lane / 4, before and after.
__device__ __forceinline__ uint32 turn(uint32 pair) {
  uint32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
