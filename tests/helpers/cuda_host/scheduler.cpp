// Threads as fibers, and their order.
#include "machine.h"

#include <ucontext.h>

#include <algorithm>

namespace host {

Thread* self;
std::vector<Thread*> ready;
std::list<Load> loads;
std::list<CopiedArrival> arrivals;
std::minstd_rand random_numbers;
SpecialRegisters registers;

namespace {

jmp_buf scheduler;
std::size_t ready_begin;  // of those in `ready` that have not run, in the order without a seed

void resume(Thread& t) {
  self = &t;
  registers = t.registers;
  if (_setjmp(scheduler) == 0) {
    if (t.started) _longjmp(t.context, 1);
    t.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = t.stack + kGuardBytes, context.uc_stack.ss_size = kStackBytes - kGuardBytes;
    makecontext(
        &context,
        [] {
          launch->kernel(launch->arguments);
          self->finished = true, --self->cta->running;
          _longjmp(scheduler, 1);
        },
        0);
    setcontext(&context);
  }
  self = nullptr;
}

void yield() {
  Thread& t = *self;
  if (_setjmp(t.context) == 0) _longjmp(scheduler, 1);
}

// Runs one thread, or lets one load or the copies of one thread land. False if nothing is left to do.
bool step() {
  const std::size_t count = ready.size() - ready_begin, in_flight = loads.size() + arrivals.size();
  if (!count && !in_flight) return false;
  // Without a seed they land when no thread can go on.
  const std::size_t chosen = launch->seed ? random_numbers() % (count + in_flight) : 0;
  if (chosen >= count + loads.size()) {
    const Thread* thread = std::next(arrivals.begin(), chosen - count - loads.size())->thread;
    const auto first = std::find_if(arrivals.begin(), arrivals.end(),
                                    [&](const CopiedArrival& one) { return one.thread == thread; });
    land(*first);
    arrivals.erase(first);
    return true;
  }
  if (chosen >= count) {
    const auto load = std::next(loads.begin(), chosen - count);
    land(*load);
    loads.erase(load);
    return true;
  }
  if (launch->seed) std::swap(ready[ready_begin], ready[ready_begin + chosen]);
  Thread* t = ready[ready_begin++];
  if (ready_begin >= 4096) ready.erase(ready.begin(), ready.begin() + ready_begin), ready_begin = 0;
  resume(*t);
  return true;
}

}  // namespace

void block(Queue& queue, const char* instruction, std::uint32_t pc, const Barrier* barrier, std::uint32_t parity,
           int threads) {
  Thread& t = *self;
  t.instruction = instruction, t.pc = pc, t.barrier = barrier, t.parity = parity, t.threads = threads;
  queue.threads.push_back(&t);
  yield();
}

void wake(Queue& queue) {
  ready.insert(ready.end(), queue.threads.begin(), queue.threads.end());
  queue.threads.clear();
}

void run_ready_threads() {
  ready_begin = 0;
  while (step()) {
  }
}

std::string deadlock() {
  std::string text = "deadlock: every thread waits";
  for (int c = 0; c < num_ctas; ++c)
    for (int first = 0; first < launch->threads; first += 32) {
      std::map<std::string, int> waits;
      for (int i = first; i < std::min(first + 32, launch->threads); ++i) {
        const Thread& t = ctas[c].threads[i];
        if (t.finished) continue;
        std::string what = std::string(t.instruction) + " " + at(t.pc);
        if (const Barrier* b = t.barrier)
          what += " for parity " + std::to_string(t.parity) + " of the " + describe(*b) + ": phase " +
                  std::to_string(b->phase) + " lacks " + std::to_string(b->missing) + " of " +
                  std::to_string(b->arrivals) + " arrivals and " + std::to_string(b->bytes) + " bytes";
        if (t.threads) what += " for " + std::to_string(t.threads) + " threads";
        ++waits[what];
      }
      for (const auto& [what, count] : waits)
        text += "\n  CTA " + std::to_string(ctas[c].threads[0].registers.block.x) + " warp " +
                std::to_string(first / 32) + ", " + std::to_string(count) + " threads: " + what;
    }
  return text;
}

}  // namespace host
