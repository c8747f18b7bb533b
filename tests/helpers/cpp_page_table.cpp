// Prints a page table that grows and shrinks: cpp_page_table
// Each line has the free pages, then length and pages of each request of the batch; a refused call has its message, and
// a line of the batch follows that must be as before.
#include <attn_ops/page_table.h>

#include <functional>
#include <iostream>
#include <string>
#include <vector>

using attn::PageTable;

int main() {
  PageTable table(6, 4);
  std::vector<PageTable::Request> batch;
  const auto print = [&] {
    const attn::Batch found = table.batch(batch);
    std::cout << "batch " << table.free_pages();
    for (const at::Tensor& t : {found.kv_indptr, found.kv_indices, found.kv_last_page_len}) {
      std::cout << " |";
      for (int64_t i = 0; i < t.numel(); ++i) std::cout << ' ' << t[i].item<int32_t>();
    }
    std::cout << '\n';
  };
  const auto refused = [&](const std::function<void()>& call) {
    try {
      call();
      std::cout << "accepted\n";
    } catch (const attn::CapacityError& error) {
      std::cout << "CapacityError: " << error.what() << '\n';
    } catch (const attn::ArgumentError& error) {
      std::cout << "ArgumentError: " << error.what() << '\n';
    } catch (const attn::OptionError& error) {
      std::cout << "OptionError: " << error.what() << '\n';
    }
    print();
  };

  const auto a = table.add(), b = table.add(), c = table.add();
  batch = {a, b, c};
  print();
  table.append(a, 7);
  table.append(c, 4);
  print();
  table.append(a);
  table.append(c);
  print();
  std::cout << "needs";
  for (const int64_t tokens : {0, 1, 4, 5, 9}) std::cout << ' ' << table.needed(a, tokens) << ' ' << table.needed(c, tokens);
  std::cout << '\n';
  refused([&] { table.append(b, 9); });
  refused([&] { table.append(b, INT64_MAX); });
  refused([&] { table.append(b, -1); });
  refused([&] { table.needed(b, -1); });
  refused([&] { table.append(7, 1); });
  refused([&] { table.release(7); });
  refused([&] { table.batch({a, 7}); });
  refused([] { PageTable(0, 4); });
  refused([] { PageTable(4, int64_t{1} << 31); });
  batch = {c, b};
  table.release(a);
  refused([&] { table.length(a); });
  table.append(b, 13);
  print();
  std::cout << "length " << table.length(b) << " pages " << table.pages(b).size() << '\n';
}
