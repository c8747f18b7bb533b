// Division by integers that are known only at run time, as a multiplication by an inverse. An integer division takes
// some 30 instructions, three of them on the special function unit (MUFU), which also computes the exponentials of
// consumers.
#pragma once

#include "basics.cuh"

namespace attn_ops {
namespace {

// Division of any 32-bit number. `inverse` is floor(2^32 / divisor) or one less, so that `first` is the quotient or one
// less.
struct FastDivide {
  uint32 divisor, inverse;

  DEVICE explicit FastDivide(uint32 divisor) : divisor(divisor), inverse(~uint32(0) / divisor) {}
  DEVICE uint32 quotient(uint32 n) const {
    const uint32 first = __umulhi(n, inverse);
    return first + (n - first * divisor >= divisor);
  }
  DEVICE uint32 remainder(uint32 n) const { return n - quotient(n) * divisor; }
};

// Division of packed row i by the group, as one multiplication. With inverse = ceil(2^31 / group), 2 i inverse / 2^32
// exceeds i / group by less than i / 2^31. So both have the same integer part while i * group < 2^31. Here i is the
// remainder of a unit plus a packed row of the unit, less than group + 192 (three consumers): i * group < 2^31 for
// every group up to kMaxGroup.
struct DivideByGroup {
  uint32 inverse;

  DEVICE explicit DivideByGroup(int group) : inverse(((uint32(1) << 31) - 1) / uint32(group) + 1) {}
  DEVICE int operator()(int packed_row) const { return __umulhi(2 * uint32(packed_row), inverse); }
};

}  // namespace
}  // namespace attn_ops
