// Matrix products of a warp (mma.sync), and how its lanes get their operands. Plain PTX.
//
// A product is D [16, 8] += A [16, 16] B [16, 8]. With r = lane / 4 and c = 2 * (lane % 4), a lane has of
//     A   rows r and r + 8, columns c, c + 1 and these plus 8: a[0] is (r, c), a[1] (r + 8, c), a[2] (r, c + 8), a[3] both
//     B   rows c, c + 1 and these plus 8 of column r: b[0] and b[1]
//     D   row r, columns c and c + 1: d[0] and d[1]; row r + 8: d[2] and d[3]
//
// The macro DTYPE is the type of the operands: 1 float16, 2 bfloat16.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

// Four matrices of 8 rows of 16 bytes. Lanes 8 m to 8 m + 7 give the addresses of the rows of matrix m. A lane gets
// word lane % 4 of row lane / 4 of each.
DEVICE void load_matrices(uint32 (&m)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// The same, transposed as 16-bit elements: a lane gets element lane / 4 of rows 2 (lane % 4) and the next one.
DEVICE void load_transposed(uint32 (&m)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// A matrix of 8 x 8 16-bit elements in registers, transposed: in a lane, columns 2 (lane % 4) and the next one of row
// lane / 4.
DEVICE uint32 transpose(uint32 m) {
  uint32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

// The bytes 0, 2, 1 and 3 of a word.
DEVICE uint32 even_bytes_first(uint32 x) {
  uint32 sorted;
  asm("prmt.b32 %0, %1, 0, 0x3120;" : "=r"(sorted) : "r"(x));
  return sorted;
}

// Four bytes of `low`, numbers 0 to 3, and `high`, 4 to 7: the four lowest digits of `selector` choose them, the first one
// that of the lowest byte.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  uint32 chosen;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(selector));
  return chosen;
}

DEVICE void multiply_add(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." DTYPE_NAME "." DTYPE_NAME
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace attn_ops
