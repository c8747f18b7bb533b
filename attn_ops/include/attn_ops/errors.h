// Errors of the C++ API. Every message says what was wrong, what was expected and how to fix it, in the words of the
// Python errors. The classes are those of attn_ops/errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace attn {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ShapeError : Error {
  using Error::Error;
};
struct DTypeError : Error {
  using Error::Error;
};
struct DeviceError : Error {
  using Error::Error;
};
struct OptionError : Error {
  using Error::Error;
};
struct ArgumentError : Error {
  using Error::Error;
};
struct PlanError : Error {
  using Error::Error;
};
struct CapacityError : PlanError {
  using PlanError::PlanError;
};
struct PageTableError : PlanError {
  using PlanError::PlanError;
};
// A file is not a package, or not one that attn_ops.export_package of this version wrote. C++ only.
struct PackageError : Error {
  using Error::Error;
};

template <class E>
[[noreturn]] void fail(
    const std::string& where, const std::string& what, const std::string& expected, const std::string& fix) {
  throw E(where + ": " + what + "; expected " + expected + "; " + fix);
}

}  // namespace attn
