#include "disagg/transport/nccl_api.h"

#include <dlfcn.h>

namespace xpyd {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Result<NcclApi> load_nccl(const std::string& name) {
  const auto unusable = [](const std::string& why) {
    return Error{ErrorCode::unavailable, "nccl: " + why};
  };
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
    return unusable(name + " is version " + version_text(api.version) + ", expected " +
                    version_text(kNcclOldest) + " or later");
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
        " (NCCL wants a card for each of the two; two processes share one where their "
        "NCCL_HOSTID differ, and two instances of one process cannot)";
  return text;
}

}  // namespace xpyd
