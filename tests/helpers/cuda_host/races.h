// Which accesses to memory are ordered: vector clocks, and what they find.
//
// An entity does things in an order of its own: a thread; the tensor cores of a warp, whose products are numbered; the
// bulk stores of a thread, which are too; an mbarrier, whose phases are. A clock says up to which time one knows what
// each entity did. Who releases (an arrival, a barrier of threads) gives its clocks on, and who acquires (a wait)
// joins them to its own. An access of entity e at its time t is ordered before another if the other knows e up to t.
// Two accesses, one of which writes, must be ordered whatever order the scheduler has chosen: so a missing arrival or
// wait is found in any.
//
// Threads write by the generic proxy; TMA and WGMMA access shared memory by the async proxy. That sees a generic write
// only if a thread that knew of it has executed a proxy fence. `fenced` is what is known to be so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace host {

using Time = std::uint32_t;
using Entity = std::uint16_t;

constexpr int kMaxCtas = 2, kMaxThreads = 768, kMaxWarps = kMaxThreads / 32, kMaxBarriers = 64;
constexpr int kMaxBulkThreads = 64;  // of a CTA, that have bulk stores
constexpr Time kNever = ~Time(0);    // of what nobody knows to have ended
constexpr Entity kEntitiesOfCta = kMaxThreads + kMaxWarps + kMaxBarriers + kMaxBulkThreads;
constexpr Entity kEntities = kMaxCtas * kEntitiesOfCta, kNobody = 0xFFFF;

constexpr Entity thread_entity(int cta, int thread) { return Entity(cta * kEntitiesOfCta + thread); }
constexpr Entity tensor_core_entity(int cta, int warp) { return Entity(cta * kEntitiesOfCta + kMaxThreads + warp); }
constexpr Entity barrier_entity(int cta, int number) {
  return Entity(cta * kEntitiesOfCta + kMaxThreads + kMaxWarps + number);
}
constexpr Entity bulk_entity(int cta, int number) {
  return Entity(cta * kEntitiesOfCta + kMaxThreads + kMaxWarps + kMaxBarriers + number);
}
constexpr bool is_tensor_core(Entity e) {
  return unsigned(e % kEntitiesOfCta - kMaxThreads) < unsigned(kMaxWarps);
}

using Clock = Time[kEntities];

struct View {
  Clock known, fenced;
};

inline std::unordered_map<std::uint32_t, View> published;  // what a cluster knew when it counted, by its number

inline int used_entities;  // by the CTAs that run

inline void join(View& to, const View& from) {
  for (int i = 0; i < used_entities; ++i) to.known[i] = std::max(to.known[i], from.known[i]);
  for (int i = 0; i < used_entities; ++i) to.fenced[i] = std::max(to.fenced[i], from.fenced[i]);
}

// What all of several know.
inline void meet(View& to, const View& other) {
  for (int i = 0; i < used_entities; ++i) to.known[i] = std::min(to.known[i], other.known[i]);
  for (int i = 0; i < used_entities; ++i) to.fenced[i] = std::min(to.fenced[i], other.fenced[i]);
}

struct Access {
  std::uint32_t pc;  // where the kernel made it, in its image
  Time time;
  Entity entity;  // a product is that of the four tensor cores from this one on
  bool async;
  bool acquired = false;  // the thread has executed a fence for the whole GPU

  bool ordered_before(const View& view) const {
    if (!is_tensor_core(entity)) return view.known[entity] >= time;
    return *std::min_element(view.known + entity, view.known + entity + 4) >= time;
  }
};

[[noreturn]] void fail(std::string message);
std::string describe(const Access& access);

// The latest accesses to one element of memory.
struct Word {
  std::uint32_t cluster;  // which wrote and read it; those of a launch run one after the other
  std::uint16_t num_reads;
  bool overflows;         // into Shadow::more_reads
  Access write, reads[4];
};

// The accesses to a range of memory, by elements of `granule` bytes.
class Shadow {
 public:
  void reset(std::size_t bytes, int granule) {
    granule_ = granule;
    words_.assign((bytes + granule - 1) / granule, Word{});
    more_reads_.clear();
  }
  bool exists() const { return !words_.empty(); }

  // `is_shared`: the memory of a cluster, which has no contents when it begins.
  void read(std::size_t offset, std::size_t bytes, const Access& by, const View& view, std::uint32_t cluster,
            bool is_shared, const char* name) {
    for (std::size_t i = offset / granule_; i * granule_ < offset + bytes; ++i) {
      Word& word = at(i, cluster, is_shared, false, by, name);
      if (word.write.entity == kNobody) {
        if (is_shared) fail("read of uninitialised memory: " + place(i, name) + "\n  by " + describe(by));
      } else {
        check(word.write, by, view, i, name);
      }
      remember(word, by, view);
    }
  }

  void write(std::size_t offset, std::size_t bytes, const Access& by, const View& view, std::uint32_t cluster,
             bool is_shared, const char* name) {
    for (std::size_t i = offset / granule_; i * granule_ < offset + bytes; ++i) {
      Word& word = at(i, cluster, is_shared, true, by, name);
      if (word.write.entity != kNobody) check(word.write, by, view, i, name);
      for (int r = 0; r < word.num_reads; ++r) check_read(word.reads[r], by, view, i, name);
      if (word.overflows) {
        for (const Access& read : more_reads_[&word]) check_read(read, by, view, i, name);
        more_reads_.erase(&word);
      }
      word.write = by, word.num_reads = 0, word.overflows = false;
    }
  }

 private:
  Word& at(std::size_t i, std::uint32_t cluster, bool is_shared, bool writes, const Access& by, const char* name) {
    Word& word = words_.at(i);
    if (word.cluster == cluster) return word;
    const bool seen = by.acquired && !writes && word.write.entity != kNobody && published.contains(word.cluster) &&
                      word.write.ordered_before(published[word.cluster]);
    const bool conflict =
        !is_shared && word.cluster && !seen && (word.write.entity != kNobody || (writes && word.num_reads));
    if (conflict) fail("race between clusters: " + place(i, name) + "\n  one is " + describe(by));
    if (word.overflows) more_reads_.erase(&word);
    word = {cluster, 0, false, {0, 0, kNobody, false}, {}};
    return word;
  }

  void check(const Access& write, const Access& by, const View& view, std::size_t i, const char* name) const {
    if (!write.ordered_before(view))
      fail("race: " + place(i, name) + "\n  after a write by " + describe(write) + "\n  without order, access by " +
           describe(by));
    if (by.async && !write.async && view.fenced[write.entity] < write.time)
      fail("no proxy fence: " + place(i, name) + "\n  between a write by " + describe(write) + "\n  and an access by " +
           describe(by));
  }

  void check_read(const Access& read, const Access& by, const View& view, std::size_t i, const char* name) const {
    if (!read.ordered_before(view))
      fail("race: " + place(i, name) + "\n  after a read by " + describe(read) + "\n  without order, a write by " +
           describe(by));
  }

  void remember(Word& word, const Access& by, const View& view) {
    for (int r = 0; r < word.num_reads; ++r)
      if (word.reads[r].entity == by.entity || word.reads[r].ordered_before(view)) {
        word.reads[r] = by;
        return;
      }
    if (word.num_reads < std::size(word.reads)) {
      word.reads[word.num_reads++] = by;
      return;
    }
    std::vector<Access>& more = more_reads_[&word];
    word.overflows = true;
    for (Access& read : more)
      if (read.entity == by.entity) {
        read = by;
        return;
      }
    more.push_back(by);
  }

  std::string place(std::size_t i, const char* name) const {
    return "byte " + std::to_string(i * granule_) + " of " + name;
  }

  int granule_ = 4;
  std::vector<Word> words_;
  std::unordered_map<const Word*, std::vector<Access>> more_reads_;
};

}  // namespace host
