// --ranks processes: an instance with several stages is a head, a worker's process, and a process for each stage.
#pragma once

#include "base/options/options.h"
#include "base/status.h"
#include "disagg/processes/registry.h"
#include "disagg/processes/worker.h"
#include "server/stack.h"

namespace xpyd::server {

class SignalThread;

// Whether ranks can be processes as the options say. Errors name the option.
Status check_rank_processes(const Options& options, const Stack& stack);

// What makes a worker a head, where its instance has several stages and --ranks says so; nothing: threads.
// `registry`: where its address is announced by rank_group_name(), if there is one.
std::optional<ranks::HeadOptions> head_options(const Options& options, const Stack& stack, const ClusterKey& key,
                                               Registry* registry);

// What the registry calls the instance whose stages are remote: --rank-group.
std::string rank_group_name(const Options& options);

// xpyd worker --rank N: a stage. Returns when it has ended.
Status serve_stage(const Options& options, const Stack& stack, const WorkerOptions& worker, SignalThread& signals);

}  // namespace xpyd::server
