// Runs one LinearList kernel in the SIMT machine on buffers read from files, cut by the library's own plan.
//
//   harness OP DTYPE order=K B=.. N=.. I=.. O=.. NAME=FILE,offset,row,linear,feature ...
//
// OP: forward (x, weight, bias, out) or backward (grad_out, x, weight, grad_x, grad_weight, grad_bias). A
// name that is left out is a null pointer. Results are files too: they are read for their size, poisoned,
// filled and written back. planned_N=.. cuts as if the list were that long. OP plan prints the plan; convert
// sends FILE through the half types; selftest tests the machine.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "linear_list_kernel.cuh"

namespace {

using namespace fastlayers;
using Arguments = std::map<std::string, std::string>;

std::vector<unsigned char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Traced, a buffer has room on both sides, so that an access beyond it is reported and not fatal.
#ifdef SIMT_TRACE
constexpr size_t kRoom = 4096;
#else
constexpr size_t kRoom = 0;
#endif

// A heap buffer of exactly the file's size, at an address as aligned as torch's.
struct Memory {
  std::string path;
  size_t bytes = 0;
  std::unique_ptr<unsigned char, decltype(&std::free)> memory{nullptr, std::free};
  unsigned char* data = nullptr;
  int64_t offset = 0, row = 0, linear = 0, feature = 0;

  Memory(const Arguments& arguments, const std::string& name, bool output) {
    const auto found = arguments.find(name);
    if (found == arguments.end()) return;
    std::istringstream text(found->second);
    char comma;
    std::getline(text, path, ',');
    text >> offset >> comma >> row >> comma >> linear >> comma >> feature;
    const auto content = read_file(path);
    bytes = content.size();
    void* start = nullptr;
    if (posix_memalign(&start, 512, bytes + 2 * kRoom) != 0) throw std::bad_alloc();
    memory.reset(static_cast<unsigned char*>(start));
    data = memory.get() + kRoom;
    std::copy(content.begin(), content.end(), data);
    if (output) std::fill_n(data, bytes, static_cast<unsigned char>(0xff));
    simt::watch(name, data, bytes, output);
  }

  template <typename T>
  T* start() const {
    return data ? reinterpret_cast<T*>(data) + offset : nullptr;
  }
  template <typename T>
  Strided<T> strided() const {
    return {start<T>(), row, linear, feature};
  }
  void write_back() const {
    if (data) std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), bytes);
  }
};

Shape shape_of(const Arguments& a) {
  return {std::stoll(a.at("B")), std::stoll(a.at("N")), std::stoi(a.at("I")), std::stoi(a.at("O"))};
}

// The library's plan; planned_N: as if the list were that long.
template <typename T>
Plan plan_for(const Arguments& a, Shape shape, bool backward, bool x_vectors, bool grad_out_vectors) {
  const int64_t linears = shape.linears;
  if (a.count("planned_N")) shape.linears = std::stoll(a.at("planned_N"));
  const PlanOptions options{sizeof(T), sizeof(accumulator_t<T>), backward, x_vectors, grad_out_vectors};
  Plan plan = make_plan(shape, options);
  plan.blocks = divide_up(linears, plan.tile.linears);
  return plan;
}

template <typename T>
void run(const std::string& op, const Arguments& a) {
  const Shape shape = shape_of(a);
  const auto order = static_cast<unsigned>(std::stoul(a.at("order")));
  const auto grid = [](const Plan& plan) {
    return Dim3{static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.row_blocks), 1};
  };
  const Memory x(a, "x", false), weight(a, "weight", false);
  const auto x_view = x.strided<const T>();
  const int in = shape.in_features, out_features = shape.out_features;
  if (op == "backward") {
    const Memory grad_out(a, "grad_out", false);
    const Memory grad_x(a, "grad_x", true), grad_weight(a, "grad_weight", true),
        grad_bias(a, "grad_bias", true);
    const auto grad_out_view = grad_out.strided<const T>();
    const auto grad_x_view = grad_x.strided<T>();
    const bool across = linear_first(grad_x_view);
    const Plan plan = plan_for<T>(a, shape, true, copies_as_vectors(x_view, shape.linears, in, false),
                                  copies_as_vectors(grad_out_view, shape.linears, out_features, across));
    simt::launch(grid(plan), kThreads, plan.shared_bytes, order, [&] {
      linear_list_backward_kernel<T>(grad_out_view, x_view, weight.start<T>(), grad_x_view,
                                     grad_weight.start<T>(), grad_bias.start<T>(), shape, plan.tile);
    });
    for (const Memory* result : {&grad_x, &grad_weight, &grad_bias}) result->write_back();
  } else {
    const Memory bias(a, "bias", false), out(a, "out", true);
    const auto out_view = out.strided<T>();
    const bool vectors = copies_as_vectors(x_view, shape.linears, in, linear_first(out_view));
    const Plan plan = plan_for<T>(a, shape, false, vectors, false);
    simt::launch(grid(plan), kThreads, plan.shared_bytes, order, [&] {
      linear_list_kernel<T>(x_view, weight.start<T>(), bias.start<T>(), out_view, shape, plan.tile);
    });
    out.write_back();
  }
  std::puts(simt::report().c_str());
}

void print_plan(const std::string& op, const Arguments& a) {
  const Shape shape = shape_of(a);
  const bool backward = op == "plan_backward", vectors = a.at("vectors") == "1";
  const Plan p =
      make_plan(shape, {std::stoi(a.at("item")), std::stoi(a.at("accumulator")), backward, vectors, vectors});
  const bool fits = backward ? fits_backward(shape) : fits_forward(shape);
  std::printf(
      "{\"linears\": %d, \"rows\": %d, \"blocks\": %lld, \"row_blocks\": %lld, \"shared_bytes\": %zu, "
      "\"fits\": %s}\n",
      p.tile.linears, p.tile.rows, static_cast<long long>(p.blocks), static_cast<long long>(p.row_blocks),
      p.shared_bytes, fits ? "true" : "false");
}

// Widen every element of FILE (as uint16) to float32 and narrow it back; writes FILE.wide and FILE.narrow.
template <typename T>
void convert(const std::string& path) {
  const auto content = read_file(path);
  const auto* items = reinterpret_cast<const T*>(content.data());
  const size_t count = content.size() / sizeof(T);
  std::vector<float> wide(count);
  std::vector<T> back(count);
  for (size_t i = 0; i < count; ++i) {
    wide[i] = widen(items[i]);
    back[i] = narrow<T>(wide[i] * 1.00390625f);  // off the grid, so that narrowing has to round
  }
  std::ofstream(path + ".wide", std::ios::binary).write(reinterpret_cast<char*>(wide.data()), 4 * count);
  std::ofstream(path + ".narrow", std::ios::binary).write(reinterpret_cast<char*>(back.data()), 2 * count);
}

// One small kernel with, where asked for, a fault that the machine has to notice.
void selftest(const std::string& fault) {
  constexpr int threads = 64;
  std::vector<int> result(threads, -1);
  simt::watch("result", result.data(), result.size() * sizeof(int), true);
  simt::launch({1, 1, 1}, threads, (threads + 1) * sizeof(int), 2, [&] {
    auto* shared = reinterpret_cast<int*>(simt::shared_memory());
    const int self = static_cast<int>(threadIdx.x);
    if (fault == "shuffle") {
      int sum = self;
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      result[self] = sum + 10000 * __shfl_down_sync(~0u, self, 1) + 1000000 * __shfl_sync(~0u, self, 5);
      return;
    }
    shared[self] = self;
    if (fault != "no barrier") __syncthreads();
    if (fault == "barrier in a branch" && self < 32) __syncthreads();
    const int value = shared[fault == "unwritten" ? threads : (self + 1) % threads];
    if (fault != "a result left out" || self != 7) result[fault == "written twice" ? self / 2 : self] = value;
    if (fault == "outside") result[threads + self] = value;
  });
  for (int value : result) std::printf("%d ", value);
  std::printf("\n%s\n", simt::report().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "", dtype = argc > 2 ? argv[2] : "";
  Arguments arguments;
  for (int i = 3; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    if (equals != std::string::npos) arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  try {
    if (op == "selftest") {
      selftest(dtype);
    } else if (op.rfind("plan", 0) == 0) {
      print_plan(op, arguments);
    } else if (op == "convert") {
      dtype == "float16" ? convert<__half>(argv[3]) : convert<__nv_bfloat16>(argv[3]);
    } else if (dtype == "float32") {
      run<float>(op, arguments);
#ifndef HARNESS_FLOAT32_ONLY
    } else if (dtype == "float64") {
      run<double>(op, arguments);
    } else if (dtype == "float16") {
      run<__half>(op, arguments);
    } else if (dtype == "bfloat16") {
      run<__nv_bfloat16>(op, arguments);
#endif
    } else {
      throw std::runtime_error("unknown: " + op + " " + dtype);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "harness: %s\n", error.what());
    return 2;
  }
}
