// Products of matrices: WGMMA of a warpgroup.
#include "machine.h"

#include <cstring>

#include "numbers.h"

namespace host {

std::vector<std::unique_ptr<Accumulator>> accumulators;

namespace {

// An operand in shared memory. Its rows are as wide as the swizzle. Hardware swizzles addresses: the layout repeats every 8
// rows, counted from address 0.
struct Operand {
  std::uint32_t start, leading, stride, width;  // bytes

  Operand(std::uint64_t d, std::uint32_t pc)
      : start(d << 4 & 0x3FFF0), leading(d >> 12 & 0x3FFF0), stride(d >> 28 & 0x3FFF0), width(256 >> (d >> 62)) {
    if ((width != 128 && width != 64) || (d >> 49 & 7))
      fail("a descriptor of another swizzle than 128 or 64 bytes, " + at(pc));
  }
  // Of 16 bytes of row `r` of the matrix in memory.
  std::uint32_t chunk(std::uint32_t r, std::uint32_t byte) const {
    return swizzled(start + r / 8 * stride + r % 8 * width + byte / width * leading + byte % width, width);
  }
};

struct Multiplication {
  WarpGroup& group;
  const Product& product;
  Cta& cta;
  View view;  // what all threads know
  Access access;
  std::uint32_t pc;

  int size() const { return product.type == Operands::kE4M3 ? 1 : 2; }  // bytes of an element

  // Element `i` of packed ones.
  float value(const void* packed, int i) const {
    if (size() == 1) return from_e4m3(static_cast<const std::uint8_t*>(packed)[i]);
    const std::uint16_t x = static_cast<const std::uint16_t*>(packed)[i];
    return product.type == Operands::kBFloat16 ? from_bfloat16(x) : from_float16(x);
  }

  // Elements of 16 bytes.
  void load(std::uint32_t address, float (&to)[16]) {
    const std::uint32_t offset = address - kSharedBase;
    check_shared(cta, offset, 16, "an operand of wgmma", pc);
    cta.shared.shadow.read(offset, 16, access, view, cluster, true, cta.shared.name);
    alignas(16) char from[16];
    std::memcpy(from, cta.shared.begin + offset, sizeof from);
    for (int i = 0; i < 16 / size(); ++i) to[i] = value(from, i);
  }

  // Adds as the tensor cores add FP8 products: all terms lose their bits below 2^-13 of the largest one's leading bit.
  void add_coarsely(float* d, const float (&a)[32], const float (&b)[32][256]) const {
    static float quantum[256];
    const int columns = product.columns;
    for (int n = 0; n < columns; ++n) quantum[n] = std::abs(d[n]);
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < columns; ++n) quantum[n] = std::max(quantum[n], std::abs(a[k] * b[k][n]));
    for (int n = 0; n < columns; ++n) {
      const auto exponent = std::bit_cast<std::uint32_t>(quantum[n]) & 0x7F800000;  // 2^e of the largest
      quantum[n] = std::max(std::bit_cast<float>(exponent) * 0x1p-13f, 0x1p-100f);
      d[n] = std::trunc(d[n] / quantum[n]) * quantum[n];
    }
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < columns; ++n) d[n] += std::trunc(a[k] * b[k][n] / quantum[n]) * quantum[n];
  }

  void run(Accumulator& to) {
    static float a[64][32], b[32][256];
    const int columns = product.columns, of_word = 4 / size(), of_chunk = 16 / size(), depth = 32 / size();
    float values[16];
    if (product.a) {
      for (int t = 0; t < 128; ++t)
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < of_word; ++j)
            a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][t % 4 * of_word + i / 2 * of_chunk + j] =
                value(&group.products[t].a[i], j);
    } else if (product.a_mn_major) {
      const Operand operand(product.a_descriptor, pc);
      for (int k = 0; k < depth; ++k)
        for (int row = 0; row < 64; row += of_chunk) {
          load(operand.chunk(k, row * size()), values);
          for (int i = 0; i < of_chunk; ++i) a[row + i][k] = values[i];
        }
    } else {
      const Operand operand(product.a_descriptor, pc);
      for (int row = 0; row < 64; ++row)
        for (int k = 0; k < depth; k += of_chunk)
          load(operand.chunk(row, k * size()), values), std::copy_n(values, of_chunk, &a[row][k]);
    }
    const Operand operand(product.b_descriptor, pc);
    if (product.b_mn_major) {
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; n += of_chunk)
          load(operand.chunk(k, n * size()), values), std::copy_n(values, of_chunk, &b[k][n]);
    } else {
      for (int n = 0; n < columns; ++n)
        for (int k = 0; k < depth; k += of_chunk) {
          load(operand.chunk(n, k * size()), values);
          for (int i = 0; i < of_chunk; ++i) b[k + i][n] = values[i];
        }
    }
    for (int row = 0; row < 64; ++row) {
      float* d = to.d[row];
      if (!product.accumulate) std::fill_n(d, columns, 0.0f);
      if (size() == 1) {
        add_coarsely(d, a[row], b);
        continue;
      }
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; ++n) d[n] += a[row][k] * b[k][n];
    }
  }
};

// The place of register `i` of a warpgroup's thread in an accumulator.
float& element(Accumulator& accumulator, int thread, int i) {
  return accumulator.d[thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2];
}

InFlight* in_flight(Thread& t, const void* registers) {
  for (InFlight& one : t.in_flight)
    if (one.registers == registers) return &one;
  return nullptr;
}

// All threads of the warpgroup are here.
void multiply(WarpGroup& group, std::uint32_t pc) {
  const Product& first = group.products[0];
  Thread& leader = *group.threads[0];
  ++group.issued;
  Accumulator* accumulator = nullptr;
  if (const InFlight* one = in_flight(leader, first.d)) {
    accumulator = one->accumulator;
  } else {
    accumulators.push_back(std::make_unique<Accumulator>());
    accumulator = accumulators.back().get();
    accumulator->columns = first.columns;
  }
  const bool begins = accumulator->users == 0;
  for (int i = 0; i < 128; ++i) {
    const Product& p = group.products[i];
    Thread& t = *group.threads[i];
    if (p.columns != first.columns || p.a_descriptor != first.a_descriptor || p.b_descriptor != first.b_descriptor ||
        p.accumulate != first.accumulate || p.type != first.type || !p.a != !first.a || p.b_mn_major != first.b_mn_major ||
        p.a_mn_major != first.a_mn_major)
      fail("wgmma with different operands in a warpgroup, " + at(pc));
    t.uncommitted = group.issued;
    if (p.a) {
      if (InFlight* one = in_flight(t, p.a))
        one->until = group.issued;
      else
        t.in_flight.push_back({p.a, 16, group.issued, nullptr});
    }
    if (!begins) {
      InFlight* one = in_flight(t, p.d);
      if (!one || one->accumulator != accumulator) fail("wgmma with different accumulators in a warpgroup, " + at(pc));
      one->until = group.issued;
      continue;
    }
    if (!t.may_give_registers) fail("wgmma without wgmma.fence after its registers were used, " + at(pc));
    for (int j = 0; j < p.columns / 2; ++j) {
      element(*accumulator, i, j) = p.d[j];
      p.d[j] = std::bit_cast<float>(0x7FFFFFFF);
    }
    t.in_flight.push_back({p.d, p.columns / 2 * sizeof(float), group.issued, accumulator});
    ++accumulator->users;
  }
  static View view;
  view = leader.view;
  for (int i = 1; i < 128; ++i) meet(view, group.threads[i]->view);
  const Access access = {pc, group.issued, tensor_core_entity(leader.cta->rank, leader.index / 32), true};
  Multiplication{group, first, *leader.cta, view, access, pc}.run(*accumulator);
}

void release_accumulator(Accumulator* accumulator) {
  if (--accumulator->users) return;
  std::erase_if(accumulators, [&](const auto& one) { return one.get() == accumulator; });
}

}  // namespace

void wgmma(const Product& product) {
  const std::uint32_t pc = PC;
  WarpGroup& group = self->cta->groups[self->index / 128];
  group.products[self->index % 128] = product, group.threads[self->index % 128] = self;
  if (++group.arrived < 128) return block(group.waiting, "wgmma", pc);
  group.arrived = 0;
  multiply(group, pc);
  wake(group.waiting);
}

void wgmma_fence() { self->may_give_registers = true; }

void wgmma_commit() { self->product_groups.push_back(self->uncommitted); }

void wgmma_wait(int pending) {
  Thread& t = *self;
  Time done = 0;
  while (int(t.product_groups.size()) > pending) done = t.product_groups.front(), t.product_groups.pop_front();
  t.may_give_registers = false;
  if (!done) return;
  Time& known = t.view.known[tensor_core_entity(t.cta->rank, t.index / 32)];
  known = std::max(known, done);
  std::erase_if(t.in_flight, [&](const InFlight& one) {
    if (one.until > done) return false;
    if (one.accumulator) {
      float* d = static_cast<float*>(const_cast<void*>(one.registers));
      for (std::size_t i = 0; i < one.bytes / sizeof(float); ++i) d[i] = element(*one.accumulator, t.index % 128, int(i));
      release_accumulator(one.accumulator);
    }
    return true;
  });
}

void check_sum(float sum) {
  if (sum < 0) fail("a sum of probabilities is negative");
}

void check_registers(const float* d, int count) {
  const std::uint32_t pc = PC;
  for (const InFlight& one : self->in_flight)
    if (one.accumulator && one.registers >= d && one.registers < d + count)
      fail("an accumulator is fenced before wgmma.wait_group, by " + describe(*self) + " " + at(pc));
}

}  // namespace host
