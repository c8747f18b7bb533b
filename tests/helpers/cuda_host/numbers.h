// Conversions of floats to narrower types, rounded to the nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace host {

// The bits of |x| with EXPONENT and MANTISSA bits, where all ones are an ordinary exponent: the caller saturates first.
template <int EXPONENT, int MANTISSA>
std::uint32_t to_bits(float x) {
  constexpr int kBias = (1 << (EXPONENT - 1)) - 1;
  const int exponent = std::max(x == 0 ? -1000 : std::ilogb(x), 1 - kBias);
  const auto steps = std::uint32_t(std::nearbyint(std::ldexp(std::fabs(x), MANTISSA - exponent)));
  return (std::uint32_t(exponent + kBias - 1) << MANTISSA) + steps;  // a carry is that of the exponent
}

inline std::uint32_t sign_of(float x, int bits) { return std::bit_cast<std::uint32_t>(x) >> 31 << (bits - 1); }

inline std::uint16_t to_float16(float x) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x)); }
inline float from_float16(std::uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }

inline std::uint16_t to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7FFF;
  return std::uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t(x) << 16); }

// Saturating.
inline std::uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  return std::uint8_t(sign_of(x, 8) | (std::fabs(x) >= 448 ? 0x7E : to_bits<4, 3>(x)));
}
inline float from_e4m3(std::uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float magnitude = (x & 0x7F) == 0x7F ? NAN : exponent ? std::ldexp(8.f + mantissa, exponent - 10)
                                                              : std::ldexp(float(mantissa), -9);
  return x & 0x80 ? -magnitude : magnitude;
}
inline std::uint8_t to_e5m2(float x) {
  if (std::isnan(x)) return 0x7F;
  return std::uint8_t(sign_of(x, 8) | (std::fabs(x) >= 57344 ? 0x7B : to_bits<5, 2>(x)));
}

}  // namespace host
