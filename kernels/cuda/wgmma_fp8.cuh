// WGMMA of e4m3 operands: as in hopper.cuh, but a product has 32 columns of A, and both operands in shared memory are
// K-major. Plain PTX.
//
// A [64, 32] in registers: with r = 16 * (warp % 4) + lane / 4 and c = 4 * (lane % 4), a thread has of rows r and r + 8
// the columns c to c + 3 and these plus 16, the first in the lowest byte: a[0] is (r, c), a[1] (r + 8, c), a[2] (r, c +
// 16), a[3] both.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

// As DEFINE_WGMMA.
#define DEFINE_WGMMA_E4M3(COLUMNS, COUNT, A, B, C, D, E, F)                                                           \
  /* d = a b^T, plus d if `accumulate`: a and b in shared memory, K-major */                                          \
  DEVICE void wgmma_e4m3_ss(float (&d)[COUNT], uint64 a, uint64 b, bool accumulate) {                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k32.f32.e4m3.e4m3 {" OPERANDS_##COUNT "}, %" #A ", %" #B ", p, 1, 1;\n}"                            \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                                             \
  }                                                                                                                   \
  /* the same with a in registers */                                                                                  \
  DEVICE void wgmma_e4m3_rs(float (&d)[COUNT], const uint32 (&a)[4], uint64 b, bool accumulate) {                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k32.f32.e4m3.e4m3 {" OPERANDS_##COUNT "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E               \
                 ", p, 1, 1;\n}"                                                                                      \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                         \
  }

DEFINE_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA_E4M3(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace attn_ops
