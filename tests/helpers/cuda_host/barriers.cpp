// Barriers: of threads, of a warp's lanes, of a cluster, and mbarriers.
#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace host {

Barrier& barrier_of(std::uint32_t address, std::uint32_t pc) {
  std::uint32_t offset;
  Cta& cta = cta_of(address, &offset);
  const auto found = cta.barriers.find(offset);
  if (found == cta.barriers.end())
    fail("byte " + std::to_string(int(offset)) + " of shared memory is no mbarrier, " + at(pc));
  Barrier& b = found->second;
  if (self->view.known[b.initialiser] < b.initialised || (&cta != self->cta && !b.fenced))
    fail("the initialisation is not visible yet: " + describe(b) + "\n  used by " + describe(*self) + " " + at(pc));
  if (!cta.running) fail("a CTA of the cluster may end before this: " + describe(b) + "\n  used " + at(pc));
  return b;
}

void end_phase(Barrier& b) {
  if (b.missing || b.bytes) return;
  ++b.phase;
  b.missing = b.arrivals;
  b.done = b.arriving;
  b.done.known[b.entity] = b.phase;
  std::memset(&b.arriving, 0, sizeof b.arriving);
  wake(b.waiting);
}

namespace {

// All have arrived: those that wait know what each of them did.
void complete(Rendezvous& r) {
  for (Thread* t : r.waiting.threads) {
    join(t->view, r.view);
    ++t->time();
  }
  r.arrived = 0;
  r.any_of_last = std::exchange(r.any, false);
  std::memset(&r.view, 0, sizeof r.view);
  wake(r.waiting);
}

void meet_at(Rendezvous& r, int threads, const char* instruction, std::uint32_t pc) {
  join(r.view, self->view);
  if (++r.arrived < threads) return block(r.waiting, instruction, pc, nullptr, 0, threads);
  join(self->view, r.view);
  ++self->time();
  complete(r);
}

// What all lanes of the warp give.
const std::uint64_t* gather(std::uint64_t value, const char* instruction, std::uint32_t pc) {
  Exchange& e = self->cta->exchanges[self->index / 32];
  std::uint64_t* values = e.values[e.turn & 1];
  if (e.arrived && std::strcmp(e.instruction, instruction))
    fail("a warp diverges: lanes are at " + std::string(e.instruction) + ", and " + describe(*self) + " at " +
         instruction + " " + at(pc));
  e.instruction = instruction;
  values[self->index % 32] = value;
  if (++e.arrived < 32) {
    block(e.waiting, instruction, pc);
  } else {
    e.arrived = 0, ++e.turn;
    wake(e.waiting);
  }
  return values;
}

}  // namespace

void sync_threads() { meet_at(self->cta->all, launch->threads, "__syncthreads", PC); }
void sync_named(int id, int threads) { meet_at(self->cta->named[id], threads, "bar.sync", PC); }
void arrive_named(int id, int threads) {
  Rendezvous& r = self->cta->named[id];
  join(r.view, self->view);
  ++self->time();
  if (++r.arrived == threads) complete(r);
}

bool any_named(int id, int threads, bool value) {
  Rendezvous& r = self->cta->named[id];
  r.any |= value;
  meet_at(r, threads, "bar.red.or", PC);
  return r.any_of_last;
}

void sync_warp() { meet_at(self->cta->warps[self->index / 32], 32, "__syncwarp", PC); }

void arrive_at_cluster() {
  Rendezvous& r = ctas[0].named[0];
  if (++r.arrived > num_ctas * launch->threads) fail("the barrier of the cluster is used twice, " + at(PC));
  if (r.arrived == num_ctas * launch->threads) wake(r.waiting);
}

void wait_for_cluster() {
  const int threads = num_ctas * launch->threads;
  Rendezvous& r = ctas[0].named[0];
  if (r.arrived < threads) block(r.waiting, "barrier.cluster.wait", PC, nullptr, 0, threads);
  for (int c = 0; c < num_ctas; ++c)
    for (auto& [offset, b] : ctas[c].barriers)
      if (b.fenced) self->view.known[b.initialiser] = std::max(self->view.known[b.initialiser], b.initialised);
}

std::uint64_t exchange(std::uint64_t value, int lane, const char* instruction) {
  return gather(value, instruction, PC)[lane];
}

bool any(bool value) {
  const std::uint64_t* values = gather(value, "__any_sync", PC);
  return std::any_of(values, values + 32, [](std::uint64_t x) { return x != 0; });
}

std::uint32_t ballot(bool value) {
  const std::uint64_t* values = gather(value, "__ballot_sync", PC);
  std::uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= std::uint32_t(values[i] != 0) << i;
  return mask;
}

std::uint64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// Any lane may be elected. One is for the whole kernel, which relies on that: its loads and their arrival are in order.
bool elect() {
  gather(0, "elect", PC);
  return self->index % 32 == int(launch->seed % 32);
}

void init_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  const std::uint32_t pc = PC;
  std::uint32_t offset;
  Cta& cta = cta_of(barrier, &offset);
  check_shared(cta, offset, 8, "an mbarrier", pc);
  if (cta.barriers.count(offset) || cta.barriers.size() == kMaxBarriers || arrivals == 0)
    fail("an mbarrier is initialised twice, has no arrivals, or there are too many, " + at(pc));
  Barrier& b = cta.barriers[offset];
  b.entity = barrier_entity(cta.rank, int(cta.barriers.size()) - 1);
  b.offset = offset, b.pc = pc, b.arrivals = b.missing = int(arrivals);
  b.initialiser = self->entity(), b.initialised = self->time();
}

void fence_barrier_init() {
  for (auto& [offset, b] : self->cta->barriers)
    if (b.initialiser == self->entity()) b.fenced = true;
  ++self->time();
}

void arrive(std::uint32_t barrier, std::uint32_t bytes) {
  const std::uint32_t pc = PC;
  Barrier& b = barrier_of(barrier, pc);
  if (b.missing == 0) fail("more arrivals than a phase has: " + describe(b) + "\n  " + describe(*self) + " " + at(pc));
  --b.missing, b.bytes += bytes;
  if (barrier >> kRankShift && &ctas[(barrier >> kRankShift) - 1] != self->cta)
    b.remote[self->entity()] = {self->time(), pc};
  join(b.arriving, self->view);
  ++self->time();
  end_phase(b);
}

// The copies are writes of the barrier's phase, by the generic proxy: who has waited for it knows of them.
void arrive_after_copies(std::uint32_t barrier) {
  const std::uint32_t pc = PC;
  Barrier& b = barrier_of(barrier, pc);
  for (const Copy& copy : self->copies) access(copy.to, copy.bytes, true, {pc, b.phase + 1, b.entity, false});
  arrivals.push_back({self, &b, std::move(self->copies), b.phase, self->view});
  self->copies.clear();
  ++self->time();
}

void land(const CopiedArrival& arrival) {
  Barrier& b = *arrival.barrier;
  if (!arrival.thread->cta->running) fail("the CTA may end before a cp.async, which arrives on the " + describe(b));
  if (b.missing == 0 || b.phase != arrival.phase)
    fail("more arrivals than a phase has, after cp.async: " + describe(b));
  for (const Copy& copy : arrival.copies) perform(copy);
  --b.missing;
  join(b.arriving, arrival.view);
  end_phase(b);
}

void wait(std::uint32_t barrier, std::uint32_t parity) {
  const std::uint32_t pc = PC;
  Barrier& b = barrier_of(barrier, pc);
  while ((b.phase & 1) == (parity & 1)) block(b.waiting, "wait", pc, &b, parity);
  join(self->view, b.done);
}

}  // namespace host
