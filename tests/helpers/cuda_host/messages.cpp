// What the machine says of a failure.
#include "machine.h"

#include <cstdio>

namespace host {

jmp_buf failed;
std::string message;

void fail(std::string text) {
  message = std::move(text);
  _longjmp(failed, 1);
}

std::string at(std::uint32_t pc) {  // Python puts the line of the source in its place
  char text[32];
  std::snprintf(text, sizeof text, "@{%x}", pc ? pc - 1 : 0);
  return text;
}

std::string describe(const Thread& t) {
  return "thread " + std::to_string(t.index) + " (warp " + std::to_string(t.index / 32) + ") of CTA " +
         std::to_string(t.registers.block.x);
}

std::string describe(const Barrier& b) {
  return "mbarrier at byte " + std::to_string(b.offset) + " of shared memory, initialised " + at(b.pc);
}

std::string describe(const Access& access) {
  const int cta = access.entity / kEntitiesOfCta, number = access.entity % kEntitiesOfCta;
  std::string text;
  if (number < kMaxThreads)
    text = describe(ctas[cta].threads[number]);
  else if (number < kMaxThreads + kMaxWarps)
    text = "wgmma of warps " + std::to_string(number - kMaxThreads) + " to " +
           std::to_string(number - kMaxThreads + 3) + " of CTA " + std::to_string(ctas[cta].threads[0].registers.block.x);
  for (const auto& [offset, b] : ctas[cta].barriers)
    if (b.entity == access.entity) text = (access.async ? "TMA onto the " : "a copy onto the ") + describe(b);
  for (const Thread& t : ctas[cta].threads)
    if (t.bulk_stores.entity == access.entity) text = "a bulk store of " + describe(t);
  return text + ", " + at(access.pc);
}

}  // namespace host
