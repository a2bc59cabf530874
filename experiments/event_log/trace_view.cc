#include "experiments/event_log/trace_view.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "experiments/event_log/read_log.h"
#include "experiments/event_log/json_in.h"

namespace xpyd::disagg {
namespace {

using nlohmann::json;

template <class T>
T read(const json& line) {
  T x;
  JsonIn::Keep keep;
  JsonIn in(line, keep);
  columns(in, x);
  return x;
}

// Writes events of the trace format, one per line. Times are in microseconds.
class TraceWriter {
 public:
  explicit TraceWriter(std::FILE* out) : out_(out) {
    std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", out_);
  }
  void end() { std::fputs("\n]}\n", out_); }

  // The number of a process, by name. "requests" is one of them. Numbers begin at 1, because viewers take 0 for an idle
  // processor.
  int process(const std::string& name) {
    auto [at, fresh] = processes_.try_emplace(name, int(processes_.size()) + 1);
    if (fresh) put_name("process_name", at->second, 1, name);
    return at->second;
  }
  // A track of a process: the steps of an instance, or one request.
  struct Track {
    int pid;
    uint64_t tid;
  };
  Track steps(const std::string& instance) { return track(process(instance), 1, "steps"); }
  Track stores(const std::string& instance) { return track(process(instance), 2, "copies to the host"); }
  Track request(const std::string& name, uint64_t request) {
    return track(process(name), request + 1, "request " + std::to_string(request));
  }
  template <class... Args>
  void span(Track track, const std::string& name, double begin_s, double end_s, const Args&... args) {
    coloured_span(track, name, begin_s, end_s, nullptr, args...);
  }
  // `colour` is one of chrome://tracing's names. With null the viewer chooses (ui.perfetto.dev: by the span's name).
  template <class... Args>
  void coloured_span(Track track, const std::string& name, double begin_s, double end_s, const char* colour,
                     const Args&... args) {
    if (end_s <= begin_s) return;
    JsonText event;
    event.open('{').add("ph", "X", "name", name, "pid", track.pid, "tid", track.tid, "ts", begin_s * 1e6, "dur",
                        (end_s - begin_s) * 1e6);
    if (colour) event.add("cname", colour);
    event.key("args").object(args...);
    event.close('}');
    put(event);
  }
  template <class... Args>
  void counters(int pid, const char* name, double at_s, const Args&... args) {
    JsonText event;
    event.open('{').add("ph", "C", "name", name, "pid", pid, "ts", at_s * 1e6).key("args").object(args...).close('}');
    put(event);
  }
  // An arrow from the span on `from` that begins at `at_s` to the next span on `to` that begins at `end_s` or later.
  void arrow(uint64_t id, Track from, Track to, double at_s, double end_s) {
    for (bool begins : {true, false}) {
      const Track& end = begins ? from : to;
      JsonText event;
      event.open('{').add("ph", begins ? "s" : "f", "id", id, "name", "KV", "cat", "kv", "pid", end.pid, "tid", end.tid,
                          "ts", (begins ? at_s : end_s) * 1e6);
      event.close('}');
      put(event);
    }
  }

 private:
  Track track(int pid, uint64_t tid, const std::string& name) {
    if (tracks_.insert({pid, tid}).second) put_name("thread_name", pid, tid, name);
    return {pid, tid};
  }
  void put_name(const char* of, int pid, uint64_t tid, const std::string& name) {
    JsonText event;
    event.open('{').add("ph", "M", "name", of, "pid", pid, "tid", tid).key("args").object("name", name).close('}');
    put(event);
  }
  void put(JsonText& event) {
    std::fputs(first_ ? "\n" : ",\n", out_);
    first_ = false;
    std::fputs(event.take().c_str(), out_);
  }
  std::FILE* out_;
  bool first_ = true;
  std::map<std::string, int> processes_;
  std::set<std::pair<int, uint64_t>> tracks_;
};

// The requests of an instance's last plan with their tokens: "7:512 9:1".
std::string batch_of(const json& plan) {
  std::string text;
  size_t at = 0;
  const auto requests = plan.value("requests", json::array());
  const json answer = plan.value("answer", json::object());
  for (const char* part : {"runs", "admits"})
    for (const json& run : answer.value(part, json::array()))
      text += (text.empty() ? "" : " ") + requests.at(at++).dump() + ":" + run.at("n_tokens").dump();
  return text;
}

void put_step(TraceWriter& trace, const StepTrace& s, const std::string& batch) {
  const TraceWriter::Track track = trace.steps(s.instance);
  const char* name = s.tokens == 0 ? "decode" : s.decodes == 0 ? "prefill" : "mixed";
  const double ends_s = s.t + s.seconds;
  trace.span(track, name, s.t, ends_s, "steps", s.steps, "tokens", s.tokens, "decodes", s.decodes, "context", s.context,
             "batch", batch);
  trace.counters(track.pid, "blocks", ends_s, "active", s.active, "cached", s.cached, "in_transfer", s.in_transfer,
                 "free", s.free);
  trace.counters(track.pid, "sequences", ends_s, "running", s.running, "waiting", s.waiting);
}

void put_store(TraceWriter& trace, const StoreTrace& s) {
  trace.span(trace.stores(s.instance), "swap out", s.t, s.t + s.seconds, "blocks", s.blocks, "bytes", s.bytes);
}

void put_transfer(TraceWriter& trace, const TransferTrace& s) {
  if (s.seconds <= 0) return;
  const TraceWriter::Track track = trace.request(s.from + " -> " + s.to, s.request);
  trace.span(track, s.kind.empty() ? "KV" : "KV, " + s.kind, s.t, s.t + s.seconds, "request", s.request, "tokens",
             s.tokens, "bytes", s.bytes);
  trace.arrow(s.request, track, trace.steps(s.to), s.t, s.t + s.seconds);
}

void put_request(TraceWriter& trace, const RequestTrace& request) {
  const TraceWriter::Track track = trace.request("requests", request.request);
  double at = request.t;
  for (const Phase& phase : phases(request)) {
    const std::string name = kPhases[phase.kind];
    const char* colour = name == "grant" ? "bad" : name == "transfer" ? "thread_state_iowait" : nullptr;
    trace.coloured_span(track, name, phase.begin_s, at = phase.end_s, colour, "request", request.request);
  }
  trace.span(track, "decode", at, request.ended, "tokens", request.output, "finish", request.finish);
}

// Keeps what instances report of requests until the requests' traces are read: first steps, and fetched prefixes.
class Marks {
 public:
  void plan(const json& line) {
    const json answer = line.value("answer", json::object()), requests = line.value("requests", json::array());
    size_t at = answer.value("runs", json::array()).size();
    for (size_t n = answer.value("admits", json::array()).size(); n > 0; --n)
      of_[{requests.at(at++).get<uint64_t>(), line.value("instance", "")}].begun_s.push_back(line.value("t", 0.0));
  }
  void fetch(const FetchTrace& fetch) {
    of_[{fetch.request, fetch.instance}].fetch = {fetch.t, fetch.t + fetch.seconds};
  }
  // Fills in the last attempt. An instance's own times are earlier than those at which the conductor heard of them.
  void complete(RequestTrace& request) const {
    if (const auto at = of_.find({request.request, request.prefill}); at != of_.end()) {
      std::tie(request.fetching, request.fetched) = at->second.fetch;
      if (const double begun_s = at->second.first_after(request.placed))
        request.started = std::min(request.started, begun_s);
    }
    if (const auto at = of_.find({request.request, request.decode});
        at != of_.end() && request.decode != request.prefill)
      if ((request.decoding = at->second.first_after(request.placed)) > 0)
        request.joined = std::min(request.joined, request.decoding);
  }

 private:
  struct Mark {
    std::vector<double> begun_s;
    std::pair<double, double> fetch = {0, 0};
    double first_after(double s) const {  // 0: none
      double first = 0;
      for (double begun : begun_s)
        if (begun > s && (first == 0 || begun < first)) first = begun;
      return first;
    }
  };
  std::map<std::pair<uint64_t, std::string>, Mark> of_;
};

// Passes each line to `other`, too. The requests' traces are complete at the end, without their gaps.
Result<std::vector<RequestTrace>> read_traces(std::span<const std::string> paths,
                                              const std::function<void(const std::string& kind, const json&)>& other) {
  std::vector<RequestTrace> traces;
  Marks marks;
  const Status read_all = read_event_logs(paths, [&](const std::string&, const json& line) {
    const std::string kind = line.value("e", "");
    if (kind == "plan") marks.plan(line);
    if (kind == "fetch") marks.fetch(read<FetchTrace>(line));
    if (kind == "request") traces.push_back(read<RequestTrace>(line)), traces.back().gaps = {};
    other(kind, line);
  });
  if (!read_all) return read_all.error();
  for (RequestTrace& request : traces) marks.complete(request);
  return traces;
}

}  // namespace

Status write_trace(std::span<const std::string> paths, std::FILE* out) {
  if (paths.empty()) return read_event_logs(paths, {});  // returns the error before anything is written
  TraceWriter trace(out);
  std::map<std::string, std::string> batches;
  const auto traces = read_traces(paths, [&](const std::string& kind, const json& line) {
    if (kind == "plan") batches[line.value("instance", "")] = batch_of(line);
    if (kind == "step") put_step(trace, read<StepTrace>(line), batches[line.value("instance", "")]);
    if (kind == "store") put_store(trace, read<StoreTrace>(line));
    if (kind == "transfer") put_transfer(trace, read<TransferTrace>(line));
  });
  if (traces)
    for (const RequestTrace& request : traces.value()) put_request(trace, request);
  trace.end();
  return traces ? ok() : Status(traces.error());
}

Result<std::vector<RequestTrace>> read_traces(std::span<const std::string> paths) {
  return read_traces(paths, [](const std::string&, const json&) {});
}

}  // namespace xpyd::disagg
