// What a running xpyd needs of a device: the weights there, and a model per instance. `--device` picks a row.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/device.h"
#include "base/status.h"
#include "model/config.h"
#include "model/cost_model.h"
#include "model/model.h"

namespace xpyd::server {

struct Stack;  // stack.h
struct DeviceRow;

struct BackendOptions {
  const DeviceRow* device = nullptr;
  LoadOptions load;
  int threads = 0;   // of each instance; 0: its share of the cores
  bool pin = false;  // each thread to a core of its own
  Kernels kernels;   // of the CPU; null: the machine's own choice
  std::string cuda_prefill_attention, cuda_decode_attention, cuda_graphs, gpu_split;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device& device() = 0;
  // Error `unavailable`: no room on the device.
  virtual Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue& queue) = 0;
  // What instance 0's model, which must still be there, has chosen by now: lines, or "".
  virtual std::string describe() const { return ""; }
};

// One figure of `xpyd peak`.
struct PeakFigure {
  const char* name;
  const char* unit;
  double value;
};
struct DevicePeak {
  std::string device;  // "NVIDIA H200"
  std::vector<PeakFigure> figures;
  Rates rates;  // of bf16 products and of reads
};

// Of the names that --dtype and --kv-dtype take.
Dtype find_dtype(const std::string& name);

struct DeviceRow {
  const char* name;
  // Loads the weights. Errors: invalid_argument for input that is wrong, `unavailable` for a machine that cannot.
  Result<std::unique_ptr<Backend>> (*open)(const Stack& stack);
  // What it can do, measured now; errors as of open(). Null: the host, which base/peak.h measures.
  Result<DevicePeak> (*peak)();
  size_t page_group_bytes;  // of --page-group-bytes where it is not given: what it maps well
  // The device without weights: where the pool is that processes share. Errors as of open(). Null:
  // the host.
  Result<std::unique_ptr<Device>> (*alone)();
};
std::span<const DeviceRow> devices();
const DeviceRow* find_device(const std::string& name);  // null: no such row

// The rows' functions. `stack`: as prepare_stack() leaves it.
Result<std::unique_ptr<Backend>> open_cpu_backend(const Stack& stack);
Result<std::unique_ptr<Backend>> open_cuda_backend(const Stack& stack);
Result<DevicePeak> cuda_device_peak();
Result<std::unique_ptr<Device>> open_cuda_alone();

// The host's weights as the options ask for them, read with every core.
Result<std::shared_ptr<const Weights>> load_host_weights(const Stack& stack);

}  // namespace xpyd::server
