// The one event log: every decision with the snapshot that it saw, every step of every instance, and the life of every
// request. Replay, trace viewer and attribution of a first token's time are readings of it. Lines of JSON; the first
// one says which version this is, and how it was run:
//
//   {"xpyd_event_log":1,"options":{...}}
//   {"t":0.25,"e":"place","policy":"mooncake","request":7,"view":{...},"options":{...},"answer":{...}}
//
// Decisions are the lines that replay.cc has a row for; "step", "fetch", "transfer" and "request" are in life.h. Each
// process has a file of its own: a worker's are the plans, steps, evictions and transfers of its instances.
//
// Thread safety: any thread.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "disagg/conductor/decisions.h"

namespace xpyd::disagg {

inline constexpr int kEventLogVersion = 1;

class EventLog {
 public:
  // Creates FILE, or empties a regular file of this name. At most max_bytes are written; then the last line counts what
  // was left out. Where it cannot be written any more (a full disk), an error line says so once, it ends there, and who
  // writes goes on. `options`: JSON, of the first line.
  static Result<std::unique_ptr<EventLog>> create(const std::string& path, int64_t max_bytes,
                                                  const std::string& options);
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // `more`: names and values of what the decision saw beside its view.
  template <class View, class Options, class Answer, class... More>
  void decided(double now_s, const char* kind, const char* policy, uint64_t request, const View& view,
               const Options& options, const Answer& answer, const More&... more) {
    JsonText json;
    begin(json, now_s, kind, policy, request);
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
  // What is no decision (life.h).
  template <class Life>
  void happened(const char* kind, const Life& life) {
    JsonText json;
    json.open('{').add("e", kind);
    JsonOut out(json);
    columns(out, life);
    write(json.close('}').take());
  }
  void write(std::string line);  // one object, without its end of line

 private:
  EventLog(std::string path, std::FILE* file, int64_t max_bytes)
      : path_(std::move(path)), file_(file), left_(max_bytes) {}
  void give_up();
  static void begin(JsonText& json, double now_s, const char* kind, const char* policy, uint64_t request);

  std::mutex mutex_;
  const std::string path_;
  std::FILE* file_;  // null: given up
  int64_t left_, dropped_ = 0;
};

// Each line of one run's logs after the first of each, in order, as text and parsed. Where a process was killed while
// it wrote, what there is of its last line is left out, and a warning says so: of several logs one may hold nothing
// else. Errors: not_found; invalid_argument with
// FILE:LINE: not a log, of another version, a broken line, or what `line` throws; no paths.
Status read_event_logs(std::span<const std::string> paths,
                       const std::function<void(const std::string& text, const nlohmann::json& line)>& line);

// Options of decisions that have none.
struct NoOptions {};
template <class A>
void columns(A&, Like<A, NoOptions>&) {}

}  // namespace xpyd::disagg
