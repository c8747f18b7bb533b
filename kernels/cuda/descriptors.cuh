// Descriptors of WGMMA's operands in shared memory.
#pragma once

#include "basics.cuh"

namespace attn_ops {

// A matrix in shared memory consists of groups of 8 rows of 128 bytes, the width of the swizzle. `group` is the number
// of bytes from a group to the next 8 rows, `column` from a group to the same rows in the next 128 bytes. In a K-major
// operand (queries, keys) a row has elements of the reduction, K. In an MN-major operand (values) a row has elements of
// M or N. K-major rows may have 64 bytes, and a swizzle of 64 bytes.
DEVICE uint64 k_major(uint32 address, uint32 group, int row_bytes = 128) {
  return (address & 0x3FFFF) >> 4 | uint64(1) << 16 | uint64(group >> 4) << 32 | uint64(row_bytes == 64 ? 2 : 1) << 62;
}

DEVICE uint64 mn_major(uint32 address, uint32 group, uint32 column) {
  return (address & 0x3FFFF) >> 4 | uint64(column >> 4) << 16 | uint64(group >> 4) << 32 | uint64(1) << 62;
}

}  // namespace attn_ops
