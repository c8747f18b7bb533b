// PTX of sm_90a: mbarriers, named barriers, TMA, cp.async, ldmatrix and stmatrix, warpgroup matrix products (WGMMA).
//
// Shared-memory addresses are 32-bit. WGMMA operands in shared memory are groups of 8 rows of 128 bytes, 64 16-bit
// columns, with the 128-byte swizzle that TMA writes: 16-byte chunk c of row r is at r * 128 + ((c ^ r) & 7) * 16.
//
// The macro DTYPE is the type of the WGMMA operands: 1 float16, 2 bfloat16.
#pragma once

#include "basics.cuh"

#if DTYPE == 2
#define DTYPE_NAME "bf16"
#else
#define DTYPE_NAME "f16"
#endif

namespace attn_ops {

DEVICE uint32 shared_address(const void* p) { return static_cast<uint32>(__cvta_generic_to_shared(p)); }

// The dynamic shared memory of the CTA.
DEVICE char* dynamic_shared() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// Returns `x`, which all lanes of the warp have, by a shuffle from lane 0. So the compiler knows that the value is
// uniform, and keeps it, and values computed from it alone, in uniform registers.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Returns `x`. The compiler computes values that depend on the result after this call, and so does not keep them in
// registers from the start of the kernel on.
DEVICE int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// True in one lane of the warp.
DEVICE bool elect() {
  uint32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// ---- mbarriers ----------------------------------------------------------------------------------------------------

DEVICE void init_barrier(uint32 barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void arrive_expect(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE bool try_wait(uint32 barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Waits until the phase of this parity is complete. It must be the current phase or the phase before.
DEVICE void wait(uint32 barrier, uint32 parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// ---- Named barriers and registers ---------------------------------------------------------------------------------

DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrives on a named barrier without waiting. `threads` counts all threads that arrive or sync.
DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Like named_sync. Returns whether `x` is true in any of the threads.
DEVICE bool named_any(int id, int threads, bool x) {
  uint32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(uint32(x))
      : "memory");
  return any;
}

template <int N>
DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- Copies -------------------------------------------------------------------------------------------------------

// Prefetches a tensor map, before the first load that uses it.
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Loads the box of `map` at the given coordinates, innermost first, into `to`. The bytes complete on `barrier`.
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

// The 5-D load with an L2 cache hint.
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32 barrier,
                     uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
      : "memory");
}

// L2 cache hint for TMA loads: evict_first for data that is read once, so that partial results, plans and code stay in
// L2.
DEVICE uint64 l2_cache_policy(bool evict_first) {
  uint64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}

// Copies 16 bytes from global to shared memory by cp.async; zeros unless `exists`.
DEVICE void copy_chunk(uint32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// An arrival of this thread on `barrier` as soon as all chunks that it has copied before (copy_chunk) are in shared
// memory. A thread that has waited on the barrier sees these chunks. It executes fence_async_shared before the async
// proxy (WGMMA, TMA) reads them.
DEVICE void arrive_after_chunks(uint32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void wait_for_chunks() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders writes to shared memory, by this thread or visible to this thread, before later accesses of the async proxy
// (TMA, WGMMA).
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies from shared to global memory by a bulk copy. Addresses and size are multiples of 16 bytes. Call
// fence_async_shared after the writes to shared memory.
DEVICE void store_bulk(void* to, uint32 from, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Waits until the bulk copies of this thread have read shared memory.
DEVICE void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

DEVICE void store_shared(uint32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

DEVICE void store_shared(uint32 to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }

DEVICE void store_shared(uint32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE uint2 load_two_words(uint32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

DEVICE uint4 load_shared(uint32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// Loads four matrices of 8 rows of 16 bytes. Lanes 8 m to 8 m + 7 pass the addresses of the rows of matrix m. Lane l
// gets 4 bytes of row l / 4 of each matrix, from byte 4 (l % 4) on.
DEVICE void load_matrices(uint32 (&m)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// Loads four matrices of 8 x 8 16-bit elements, transposed. Lanes 8 m to 8 m + 7 pass the addresses of the rows of
// matrix m. Lane l gets, of each matrix, element l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
DEVICE void load_transposed(uint32 (&m)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// Stores four matrices of 8 x 8 16-bit elements. Lane l has, of each matrix, columns 2 (l % 4) and 2 (l % 4) + 1 of row
// l / 4. Lanes 8 m to 8 m + 7 pass the addresses of the rows of matrix m.
DEVICE void store_matrices(uint32 row, const uint32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// Like store_matrices, transposed: lane l has, of each matrix, element l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
DEVICE void store_transposed(uint32 row, const uint32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Like store_transposed of four matrices, for two matrices: lanes 0 to 15 pass the addresses of the rows.
DEVICE void store_transposed(uint32 row, const uint32 (&m)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m[0]), "r"(m[1])
               : "memory");
}

// Converts two floats to a pair of type DTYPE, with `low` in the lower half.
DEVICE uint32 pack(float low, float high) {
  return DTYPE == 2 ? bfloat16_pair(low, high) : float16_pair(low, high);
}

// ---- WGMMA --------------------------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the exponentials that `sum` adds before the next wait for WGMMA. Without a loop that depends on them, the
// assembler moves them after that wait. The loop would run while `sum` is negative, but no sum of probabilities is
// negative, so that the cost is a branch.
DEVICE void keep_before(float sum) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\nL:\n@!p bra D;\nnanosleep.u32 100;\nbra L;\nD:\n}" ::"f"(sum)
      : "memory");
}

// The compiler moves no use of the accumulator across this call.
template <int N>
DEVICE void fence_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The compiler does not hoist computations from `x` out of the loop that has this call.
DEVICE void keep_in_loop(uint64& x) { asm volatile("" : "+l"(x)); }

// Ends the lifetime of the values of an accumulator. A product that does not accumulate does not read them, but its asm
// statement has the registers as operands, and the compiler would keep the values up to the product.
template <int N>
DEVICE void discard_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}

#define R8(d, i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
  "+f"(d[i + 7])
#define R32(d, i) R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24)
#define REGISTERS_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define REGISTERS_8(d) R8(d, 0)
#define REGISTERS_16(d) R8(d, 0), R8(d, 8)
#define REGISTERS_32(d) R32(d, 0)
#define REGISTERS_48(d) R32(d, 0), R8(d, 32), R8(d, 40)
#define REGISTERS_64(d) R32(d, 0), R32(d, 32)
#define REGISTERS_96(d) R32(d, 0), R32(d, 32), R32(d, 64)
#define REGISTERS_128(d) REGISTERS_96(d), R32(d, 96)
#define OPERANDS_4 "%0,%1,%2,%3"
#define OPERANDS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define OPERANDS_16 OPERANDS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define OPERANDS_32 OPERANDS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPERANDS_48                                                                                                    \
  OPERANDS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define OPERANDS_64                                                                                                    \
  OPERANDS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"  \
              "%57,%58,%59,%60,%61,%62,%63"
#define OPERANDS_96                                                                                                    \
  OPERANDS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,"  \
              "%89,%90,%91,%92,%93,%94,%95"
#define OPERANDS_128                                                                                                   \
  OPERANDS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
              "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// COLUMNS is the N of the product, and COUNT = COLUMNS / 2 the registers of the accumulator in each thread of the
// warpgroup. A, B and so on are the numbers of the asm operands after the accumulator. The last asm operand is the
// predicate to accumulate.
#define DEFINE_WGMMA(COLUMNS, COUNT, A, B, C, D, E, F)                                                                \
  /* d = a b^T, plus d if `accumulate`: a and b in shared memory, K-major */                                          \
  DEVICE void wgmma_ss(float (&d)[COUNT], uint64 a, uint64 b, bool accumulate) {                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." DTYPE_NAME "." DTYPE_NAME " {" OPERANDS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"  \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                                             \
  }                                                                                                                   \
  /* d += a b: a in shared memory, K-major, b MN-major */                                                             \
  DEVICE void wgmma_ss_mn(float (&d)[COUNT], uint64 a, uint64 b) {                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." DTYPE_NAME "." DTYPE_NAME " {" OPERANDS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, 0, 1;\n}"  \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "l"(a), "l"(b), "r"(1));                                                                           \
  }                                                                                                                   \
  /* d += a b^T: a in shared memory, MN-major, b K-major */                                                           \
  DEVICE void wgmma_mn_ss(float (&d)[COUNT], uint64 a, uint64 b) {                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." DTYPE_NAME "." DTYPE_NAME " {" OPERANDS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, 1, 0;\n}"  \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "l"(a), "l"(b), "r"(1));                                                                           \
  }                                                                                                                   \
  /* d = a b^T, plus d if `accumulate`: a in registers, b in shared memory, K-major */                                \
  DEVICE void wgmma_rs(float (&d)[COUNT], const uint32 (&a)[4], uint64 b, bool accumulate) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." DTYPE_NAME "." DTYPE_NAME " {" OPERANDS_##COUNT "}, {%" #A ", %" #B ", %" #C ", %" #D     \
                 "}, %" #E ", p, 1, 1, 0;\n}"                                                                         \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                         \
  }                                                                                                                   \
  /* d += a b: a in registers, b in shared memory, MN-major */                                                        \
  DEVICE void wgmma_rs_mn(float (&d)[COUNT], const uint32 (&a)[4], uint64 b) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." DTYPE_NAME "." DTYPE_NAME " {" OPERANDS_##COUNT "}, {%" #A ", %" #B ", %" #C ", %" #D     \
                 "}, %" #E ", p, 1, 1, 1;\n}"                                                                         \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                       \
  }

DEFINE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9)
DEFINE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace attn_ops
