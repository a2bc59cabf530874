// The event log: every decision with the snapshot that it saw, every step of every instance, and the trace of every
// request. experiments/event_log reads it. Each line is a JSON object. The first line has the version and the options
// of the run:
//
//   {"xpyd_event_log":1,"options":{...}}
//   {"t":0.25,"e":"place","policy":"mooncake","request":7,"view":{...},"options":{...},"answer":{...}}
//
// Decisions are the lines that replay.cc has a row for. request_trace.h has the lines "step", "fetch", "store",
// "transfer" and "request". Each process writes its own file. A worker's file has the plans, steps, evictions, copies
// and transfers of its instances.
//
// Thread safety: any thread.
#pragma once

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "disagg/conductor/decisions.h"

namespace xpyd::disagg {

inline constexpr int kEventLogVersion = 1;

class EventLog {
 public:
  // Creates FILE, or empties it. If a write fails (a full disk), an error is logged once, the log ends there, and
  // callers go on. `options` is the JSON of the first line.
  static Result<std::unique_ptr<EventLog>> create(const std::string& path, const std::string& options);
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // Logs a decision. `more` has names and values that the decision saw beside its view.
  template <class View, class Options, class Answer, class... More>
  void decided(double now_s, const char* kind, const char* policy, uint64_t request, const View& view,
               const Options& options, const Answer& answer, const More&... more) {
    JsonText json;
    json.open('{').add("t", now_s, "e", kind, "policy", policy, "request", request);
    if constexpr (sizeof...(more) > 0) json.add(more...);
    json.key("view");
    JsonOut out(json);
    out.write(view);
    json.key("options");
    out.write(options);
    json.key("answer");
    out.write(answer);
    json.close('}');
    write(json.take());
  }
  // Logs a trace that is not a decision (request_trace.h).
  template <class Line>
  void happened(const char* kind, const Line& trace) {
    JsonText json;
    json.open('{').add("e", kind);
    JsonOut out(json);
    columns(out, trace);
    write(json.close('}').take());
  }
  void write(std::string line);  // one JSON object, without a newline

 private:
  EventLog(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}
  void give_up();

  std::mutex mutex_;
  const std::string path_;
  std::FILE* file_;  // null: a write has failed
};

// The options of policies that have none.
struct NoOptions {};
template <class A>
void columns(A&, Like<A, NoOptions>&) {}

}  // namespace xpyd::disagg
