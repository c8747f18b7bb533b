// Which inputs of a package may start anywhere: cpp_alignment prints, for an input that a step on a GPU writes or reads
// and for one of a step on the CPU, what Package::run says at 0, 4 and 16 bytes from an aligned address.
#include <attn_ops/attn_ops.h>

#include <iostream>

int main() {
  const at::Tensor memory = at::zeros({64}), empty = at::zeros({0});
  for (const auto& [device, written] : {std::pair{"cuda", true}, {"cuda", false}, {"cpu", true}}) {
    const attn::InputSpec spec{"input", "cache", "float32", device, {8}, {1}, written};
    for (const at::Tensor& t : {memory.narrow(0, 0, 8), memory.narrow(0, 1, 8), memory.narrow(0, 4, 8), empty}) try {
        attn::detail::check_alignment(spec, t);
        std::cout << "ok\n";
      } catch (const attn::ShapeError& error) {
        std::cout << error.what() << '\n';
      }
  }
}
