// WGMMA of e4m3 operands. Unlike the 16-bit products of hopper.cuh, K is 32, and operands in shared memory must be
// K-major.
//
// Operand A [64, 32] in registers: with r = 16 * (warp % 4) + lane / 4 and c = 4 * (lane % 4), each register of a
// thread has four columns of a row, the first in the lowest byte. a[0] is row r from column c on, a[1] row r + 8 from c
// on, a[2] row r from c + 16 on, a[3] row r + 8 from c + 16 on.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

// Parameters as of DEFINE_WGMMA (hopper.cuh).
#define DEFINE_WGMMA_E4M3(COLUMNS, COUNT, A, B, C, D, E, F)                                                           \
  /* d = a b^T, plus d if `accumulate`: a and b in shared memory, K-major */                                          \
  DEVICE void wgmma_e4m3_ss(float (&d)[COUNT], uint64 a, uint64 b, bool accumulate) {                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k32.f32.e4m3.e4m3 {" OPERANDS_##COUNT "}, %" #A ", %" #B ", p, 1, 1;\n}"                            \
                 : REGISTERS_##COUNT(d)                                                                               \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                                             \
  }                                                                                                                   \
  /* d = a b^T, plus d if `accumulate`: a in registers, b in shared memory, K-major */                                \
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
