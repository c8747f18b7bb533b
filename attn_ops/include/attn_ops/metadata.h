// What attn_ops.export_package writes into a package (attn_ops/packaging.py lists the entries).
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "errors.h"

namespace attn {

inline constexpr const char* kFormat = "2";
inline constexpr int64_t kDynamic = -1;  // a size that the package does not fix

using Sizes = std::vector<int64_t>;

// A tensor that a step takes.
struct InputSpec {
  std::string role;  // input, plan or workspace
  std::string name;
  std::string dtype;
  std::string device;
  Sizes sizes;
  Sizes strides;
  bool written;  // by the step
};

class Metadata {
 public:
  Metadata(std::string path, std::unordered_map<std::string, std::string> entries)
      : path_(std::move(path)), entries_(std::move(entries)) {
    if (entries_.count("attn_ops.format") == 0) refuse("it has no metadata of attn_ops");
    if (text("format") != kFormat) refuse("its metadata has format " + text("format") + ", these headers " + kFormat);
    for (const std::string& name : words(text("fields"))) fields.push_back({name, sizes(text("field." + name))});
    plan = text("plan");
    device = text("device");
    if (const auto found = entries_.find("AOTI_CPU_ISA"); found != entries_.end()) cpu = found->second;
    problem = named(text("problem"));
    capacity = named(text("capacity"));
    kv_block = number(text("kv_block"));
    workspace = number(text("workspace"));
    if (fields.size() < 2 || fields[0].first != "problem") refuse("its metadata has no plan");
    const int64_t inputs_of_step = entries_.count("attn_ops.inputs") ? number(text("inputs")) : 0;
    for (int64_t i = 0; i < inputs_of_step; ++i) {
      const std::vector<std::string> w = words(text("input." + std::to_string(i)));
      if (w.size() != 7)
        refuse("its metadata of input " + std::to_string(i) + " has " + std::to_string(w.size()) + " words");
      inputs.push_back({w[0], w[1], w[2], w[3], sizes(w[4]), sizes(w[5]), w[6] == "write"});
    }
  }

  int64_t of_problem(const std::string& name) const { return find(problem, name); }
  int64_t of_capacity(const std::string& name) const { return find(capacity, name); }

  std::string plan;    // DecodePlan or PrefillPlan
  std::string device;  // its device type
  std::string cpu;     // vector instructions of the code on the host, such as AVX2, as Inductor names them
  std::vector<std::pair<std::string, Sizes>> fields;
  std::map<std::string, int64_t> problem, capacity;
  int64_t kv_block = 0;   // KV tokens in a KV block
  int64_t workspace = 0;  // float32 elements
  std::vector<InputSpec> inputs;

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail<PackageError>(
        "package", path_ + " cannot be used: " + what, "a package that attn_ops.export_package wrote",
        "export it with the version of attn_ops that has these headers");
  }
  const std::string& text(const std::string& name) const {
    const auto found = entries_.find("attn_ops." + name);
    if (found == entries_.end()) refuse("its metadata has no attn_ops." + name);
    return found->second;
  }
  static std::vector<std::string> words(const std::string& text, char separator = ' ') {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string word; std::getline(stream, word, separator);) found.push_back(word);
    return found;
  }
  int64_t number(const std::string& word) const {
    size_t read = 0;
    int64_t value = 0;
    try {
      value = std::stoll(word, &read);
    } catch (const std::exception&) {
      read = 0;
    }
    if (read == 0 || read != word.size() || value < 0) refuse("its metadata has '" + word + "' for a number");
    return value;
  }
  Sizes sizes(const std::string& text) const {
    Sizes found;
    if (text == "-") return found;
    for (const std::string& word : words(text, ',')) found.push_back(word == "?" ? kDynamic : number(word));
    return found;
  }
  std::map<std::string, int64_t> named(const std::string& text) const {
    std::map<std::string, int64_t> found;
    for (const std::string& word : words(text)) {
      const size_t at = word.find('=');
      if (at == std::string::npos) refuse("its metadata has '" + word + "' for a named number");
      found[word.substr(0, at)] = number(word.substr(at + 1));
    }
    return found;
  }
  int64_t find(const std::map<std::string, int64_t>& numbers, const std::string& name) const {
    const auto found = numbers.find(name);
    if (found == numbers.end()) refuse("its metadata has no " + name);
    return found->second;
  }

  std::string path_;
  std::unordered_map<std::string, std::string> entries_;
};

}  // namespace attn
