// Continuous batching over packages of attn_ops.export_package, without Python. See README.md.
#include <ATen/ops/tensor.h>
#include <attn_ops/attn_ops.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Request {
  int64_t arrival = 0, max_new_tokens = 0;
  std::vector<int64_t> tokens;     // prompt, then output
  int64_t prompt = 0, cached = 0;  // tokens of the prompt, tokens in the cache
  attn::PageTable::Request pages = 0;
  std::string refused = {};
};

struct Model {  // forward(tokens, caches, plan, workspace) appends to the pages and returns each request's next token
  explicit Model(const std::string& path) : planner(path), step(path) {}
  attn::Planner planner;
  attn::Package step;
};

class Server {
 public:
  Server(const std::string& prefill, const std::string& decode, const std::set<int64_t>& stop_tokens)
      : stop_tokens_(stop_tokens), prefill_(prefill), decode_(decode), caches_(decode_.step.zeros("caches")),
        pages_(caches_[0].size(0), decode_.planner.page_size()) {
    for (at::Tensor& cache : caches_) cache.fill_(NAN);  // reading what was not written would change the tokens
  }

  // Queue a request. Throws if it can never run.
  void submit(Request& r) {
    r.prompt = static_cast<int64_t>(r.tokens.size());
    const int64_t capacity = std::min(decode_.planner.max_kv_len(), caches_[0].size(0) * pages_.page_size());
    if (r.prompt < 1 || r.max_new_tokens < 1 || r.max_new_tokens - 1 > capacity - r.prompt)  // the last is not cached
      attn::fail<attn::CapacityError>(
          "submit", "a prompt of " + std::to_string(r.prompt) + " and " + std::to_string(r.max_new_tokens) + " new tokens",
          "1 or more of both, and " + std::to_string(capacity) + " or less in the cache", "change the request");
    waiting_.push_back(&r);
  }

  // Serve the queue. An iteration is a prefill step and a decode step, each of all requests that have work for it.
  void run() {
    decoded = preemptions = iterations = decode_seconds = 0;
    const double begin = now();
    for (; !waiting_.empty() || !running_.empty(); ++iterations) {
      while (!waiting_.empty() && waiting_.front()->arrival <= iterations && free_slots() > 0) {
        running_.push_back(waiting_.front());
        running_.back()->pages = pages_.add();
        waiting_.pop_front();
      }
      step(prefill_);
      const double decode_begin = now();
      decoded += step(decode_);
      decode_seconds += now() - decode_begin;
    }
    seconds = now() - begin;
  }

  int64_t free_slots() const { return decode_.planner.max_batch() - static_cast<int64_t>(running_.size()); }
  int64_t free_pages() const { return pages_.free_pages(); }
  double decoded = 0, preemptions = 0, iterations = 0, seconds = 0, decode_seconds = 0;

 private:
  // Allocate pages for more tokens of running_[i]. If none is free, the newest requests release theirs and start again.
  bool grow(size_t i, int64_t tokens) {
    for (; pages_.needed(running_[i]->pages, tokens) > pages_.free_pages(); ++preemptions) {
      if (running_.size() == i + 1) return false;
      pages_.release(running_.back()->pages);
      running_.back()->cached = 0;
      waiting_.push_front(running_.back());
      running_.pop_back();
    }
    pages_.append(running_[i]->pages, tokens);
    return true;
  }

  // A step of the requests with one token that is not cached (decode), or with more (prefill): number of new tokens.
  int64_t step(Model& model) {
    std::vector<Request*> batch;
    std::vector<attn::PageTable::Request> ids;
    std::vector<int64_t> tokens, indptr{0};
    for (size_t i = 0; i < running_.size(); ++i) {
      Request& r = *running_[i];
      const int64_t left = static_cast<int64_t>(r.tokens.size()) - r.cached;
      const int64_t count = std::min(left, model.planner.max_tokens() - indptr.back());
      if ((left > 1) != (&model == &prefill_) || count == 0 || !grow(i, count)) continue;
      tokens.insert(tokens.end(), r.tokens.begin() + r.cached, r.tokens.begin() + r.cached + count);
      indptr.push_back(indptr.back() + count);
      batch.push_back(&r);
      ids.push_back(r.pages);
      r.cached += count;
    }
    if (batch.empty()) return 0;
    const attn::Batch table = pages_.batch(ids);
    &model == &prefill_ ? model.planner.plan(at::tensor(indptr), table) : model.planner.plan(table);
    std::vector<at::Tensor> inputs{at::tensor(tokens).to(model.step.device(), /*non_blocking=*/true)};
    inputs.insert(inputs.end(), caches_.begin(), caches_.end());
    const at::Tensor next = model.step.run(inputs, model.planner).at(0).cpu();
    int64_t chosen = 0;
    for (size_t b = 0; b < batch.size(); ++b) {
      Request& r = *batch[b];
      if (r.cached < static_cast<int64_t>(r.tokens.size())) continue;  // a part of the prompt is left
      r.tokens.push_back(next.data_ptr<int64_t>()[b]);
      ++chosen;
      if (r.cached + 1 < r.prompt + r.max_new_tokens && !stop_tokens_.contains(r.tokens.back())) continue;
      pages_.release(r.pages);
      std::erase(running_, &r);
    }
    return chosen;
  }

  std::set<int64_t> stop_tokens_;
  Model prefill_, decode_;
  std::vector<at::Tensor> caches_;
  attn::PageTable pages_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;  // oldest first
};

int main(int argc, char** argv) try {
  if (argc < 4) throw attn::ArgumentError("usage: server PREFILL.pt2 DECODE.pt2 REQUESTS [STOP_TOKEN ...]");
  std::ifstream file(argv[3]);
  if (!file) throw attn::ArgumentError(std::string("server: cannot read ") + argv[3]);
  std::set<int64_t> stop_tokens;
  for (int i = 4; i < argc; ++i) {
    const char* const end = argv[i] + std::strlen(argv[i]);
    int64_t token = 0;
    const auto [rest, error] = std::from_chars(argv[i], end, token);
    if (error != std::errc() || rest != end)
      attn::fail<attn::ArgumentError>(
          "server", std::string("a stop token is '") + argv[i] + "'", "a 64-bit integer", "correct it");
    stop_tokens.insert(token);
  }
  Server server(argv[1], argv[2], stop_tokens);
  Request warm_up{.max_new_tokens = 2, .tokens = {0, 0}};
  server.submit(warm_up);
  server.run();

  std::deque<Request> requests;
  for (std::string line; std::getline(file, line);) try {
      std::istringstream words(line);
      Request& r = requests.emplace_back();
      words >> r.arrival >> r.max_new_tokens;
      std::copy(std::istream_iterator<int64_t>(words), {}, std::back_inserter(r.tokens));
      if (!words.eof())
        attn::fail<attn::ArgumentError>("server", "'" + line + "'", "ARRIVAL MAX_NEW_TOKENS TOKEN ...", "correct the line");
      server.submit(r);
    } catch (const attn::Error& error) {
      requests.back().refused = error.what();
    }
  server.run();

  for (const Request& r : requests) {
    if (!r.refused.empty()) std::cout << "refused: " << r.refused;
    const char* separator = "";
    for (size_t i = r.prompt; r.refused.empty() && i < r.tokens.size(); ++i)
      std::cout << std::exchange(separator, " ") << r.tokens[i];
    std::cout << '\n';
  }
  std::cerr << "iterations " << server.iterations << "\npreemptions " << server.preemptions << "\nfree_pages "
            << server.free_pages() << "\ndecoded " << server.decoded << "\nseconds " << server.seconds
            << "\ndecode_seconds " << server.decode_seconds << '\n';
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
