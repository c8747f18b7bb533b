// Descriptors of WGMMA's operands in shared memory.
#pragma once

#include "basics.cuh"

namespace attn_ops {

// A matrix in shared memory, of groups of 8 rows of 128 bytes, the width of the swizzle. `group` and `column` are the
// bytes from a group to the next 8 rows, and to the same rows of the next 128 bytes. K-major, the rows run along the
// result (queries, keys); MN-major, along the reduction (values). K-major rows may be of 64 bytes.
DEVICE uint64 k_major(uint32 address, uint32 group, int row_bytes = 128) {
  return (address & 0x3FFFF) >> 4 | uint64(1) << 16 | uint64(group >> 4) << 32 | uint64(row_bytes == 64 ? 2 : 1) << 62;
}

DEVICE uint64 mn_major(uint32 address, uint32 group, uint32 column) {
  return (address & 0x3FFFF) >> 4 | uint64(column >> 4) << 16 | uint64(group >> 4) << 32 | uint64(1) << 62;
}

}  // namespace attn_ops
