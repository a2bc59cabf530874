#include "disagg/transport/nccl/nccl_api.h"

#include <dlfcn.h>

#include <chrono>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>

namespace xpyd::disagg {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

constexpr int kReclaimsLater = 22800;  // version

std::mutex mutex;
std::set<std::string> reclaiming;  // threads

std::set<std::string> threads() {
  std::set<std::string> ids;
  std::error_code gone;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", gone))
    ids.insert(task.path().filename());
  return ids;
}

}  // namespace

void abort_comm(const NcclApi& api, NcclComm comm) {
  if (api.version < kReclaimsLater) {
    api.comm_abort(comm);
    return;
  }
  const std::set<std::string> before = threads();
  api.comm_abort(comm);
  std::lock_guard lock(mutex);
  for (const std::string& thread : threads())
    if (!before.contains(thread)) reclaiming.insert(thread);
}

void await_aborted(double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::lock_guard lock(mutex);
  while (!reclaiming.empty() && std::chrono::steady_clock::now() < until) {
    const std::set<std::string> now = threads();
    std::erase_if(reclaiming, [&](const std::string& thread) { return !now.contains(thread); });
    if (!reclaiming.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Result<NcclApi> load_nccl(const std::string& name) {
  const auto unusable = [](const std::string& why) { return Error{ErrorCode::unavailable, "nccl: " + why}; };
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return unusable(name + " of NVIDIA's NCCL was not found (" + dlerror() +
                    "); install libnccl2, or pip install nvidia-nccl-cu13 and name its lib folder "
                    "in LD_LIBRARY_PATH");
  NcclApi api{};
  int (*get_version)(int*) = nullptr;
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
    if (!function) missing += std::string(" ") + symbol;
  };
  find(get_version, "ncclGetVersion");
  find(api.get_unique_id, "ncclGetUniqueId");
  find(api.comm_init_rank_config, "ncclCommInitRankConfig");
  find(api.comm_get_async_error, "ncclCommGetAsyncError");
  find(api.comm_abort, "ncclCommAbort");
  find(api.group_start, "ncclGroupStart");
  find(api.group_end, "ncclGroupEnd");
  find(api.send, "ncclSend");
  find(api.recv, "ncclRecv");
  find(api.get_error_string, "ncclGetErrorString");
  find(api.get_last_error, "ncclGetLastError");
  if (!missing.empty()) return unusable(name + " is too old: it has no" + missing);
  if (get_version(&api.version) != kNcclSuccess || api.version < kNcclOldest)
    return unusable(name + " is version " + version_text(api.version) + "; expected " + version_text(kNcclOldest) +
                    " or later");
  return api;
}

Result<const NcclApi*> load_nccl() {
  static const Result<NcclApi> loaded = load_nccl("libnccl.so.2");
  if (!loaded) return loaded.error();
  return &loaded.value();
}

std::string nccl_error(const NcclApi& api, int result, NcclComm comm) {
  std::string text = api.get_error_string(result);
  const char* more = comm ? api.get_last_error(comm) : nullptr;
  if (more && *more) text += std::string(": ") + more;
  if (result == kNcclInvalidUsage)
    text +=
        " (NCCL needs a separate card for each of the two; two processes can share one if their NCCL_HOSTID differ, "
        "two instances of one process cannot)";
  return text;
}

}  // namespace xpyd::disagg
