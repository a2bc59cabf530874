#include "experiments/simulate/traces.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unordered_map>

#include "base/json/json.h"
#include "base/row_hash.h"
#include "base/siphash.h"
#include "experiments/load/arrivals.h"
#include "experiments/load/records.h"

namespace xpyd::disagg {
namespace {

using nlohmann::json;

constexpr int64_t kMaxTokens = 1 << 24;  // of one prompt or answer
constexpr double kMaxSeconds = 1e12;

// Reports an error by throwing. load_trace() below returns it as a result.
[[noreturn]] void fail(const std::string& where, const std::string& what) { throw invalid(where + ": " + what); }

// A trace as its file has it: times from any origin, in the file's order.
struct Draft {
  Draft(int block_tokens, const TraceOptions& o) : options(o) { trace.block_tokens = block_tokens; }

  bool full() const { return options.limit > 0 && int(trace.requests.size()) >= options.limit; }
  int last() const { return int(trace.requests.size()) - 1; }
  TraceRequest& add(double at_s, int64_t prompt_tokens, int64_t output_tokens) {
    trace.requests.push_back({at_s, int(prompt_tokens), int(output_tokens)});
    return trace.requests.back();
  }
  // The last request added comes after request `before`; if that is -1, it begins a session.
  void follows(int before, double think_s) {
    TraceRequest& request = trace.requests.back();
    request.after = before;
    request.session = before < 0 ? n_sessions++ : trace.requests[size_t(before)].session;
    request.think_s = before < 0 ? 0 : std::max(0.0, think_s);
  }
  // Gives the last request blocks of its own, up to the end of its prompt.
  void fill_with_own_blocks(uint64_t before = 0) {
    TraceRequest& request = trace.requests.back();
    const size_t n = size_t((request.prompt_tokens - 1) / trace.block_tokens + 1);
    while (request.blocks.size() < n) request.blocks.push_back(before = chain_hash(~before, ++n_own));
  }
  void check_order(const std::string& where) {
    if (!timed || trace.requests.empty() || !std::exchange(row_timed, true)) return;
    const double at_s = trace.requests.back().arrival_s;
    if (at_s < latest_s) fail(where, "this row is earlier than the one before; expected rows sorted by time");
    latest_s = at_s;
  }
  void note(int64_t n, const std::string& what) {
    if (n > 0) trace.notes.push_back(std::to_string(n) + what);
  }

  Trace trace;
  const TraceOptions& options;
  bool timed = true;      // arrival_s comes from the file
  bool row_timed = true;  // … and so does that of the last row
  double latest_s = 0;
  int n_sessions = 0;
  uint64_t n_own = 0;
};

// Applies the options: arrivals, jitter, order, limit, repetitions, speed.
Trace arranged(Draft draft) {
  Trace trace = std::move(draft.trace);
  const TraceOptions& options = draft.options;
  std::vector<TraceRequest>& requests = trace.requests;
  auto is_start = [](const TraceRequest& request) { return request.after < 0; };
  std::vector<double> starts_s;
  if (!draft.timed)
    starts_s = arrival_times(int(std::count_if(requests.begin(), requests.end(), is_start)), options.rate, false, 1,
                             options.seed);
  Random random(mix_seed(options.seed, 11));
  std::vector<double> shift_s;  // a request moves as far as the start that it depends on
  for (size_t start = 0; TraceRequest & request : requests) {
    double by_s = is_start(request) ? random.uniform() * options.jitter_s : shift_s[size_t(request.after)];
    if (is_start(request) && !draft.timed) by_s += starts_s[start++];
    shift_s.push_back(by_s);
    request.arrival_s += by_s;
  }
  std::vector<int> order(requests.size()), place(requests.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return requests[size_t(a)].arrival_s < requests[size_t(b)].arrival_s; });
  if (options.limit > 0) order.resize(std::min(order.size(), size_t(options.limit)));
  std::vector<TraceRequest> sorted;
  int n_sessions = 0;
  const double first_s = requests[size_t(order[0])].arrival_s;
  for (int from : order) {
    place[size_t(from)] = int(sorted.size());
    TraceRequest& request = sorted.emplace_back(std::move(requests[size_t(from)]));
    request.arrival_s -= first_s;
    n_sessions = std::max(n_sessions, request.session + 1);
    if (request.after >= 0) request.after = place[size_t(request.after)];
  }
  requests = std::move(sorted);
  // A repetition begins one mean gap after the last request of the one before.
  const size_t n = requests.size();
  const double period_s = n > 1 ? requests[n - 1].arrival_s * double(n) / double(n - 1) : 1;
  for (int copy = 1; copy < options.repeat; ++copy) {
    for (size_t i = 0; i < n; ++i) {
      TraceRequest request = requests[i];
      request.arrival_s += copy * period_s;
      if (request.after >= 0) request.after += copy * int(n);
      if (request.session >= 0) request.session += copy * n_sessions;
      for (uint64_t& id : request.blocks) id = chain_hash(id, uint64_t(copy));
      requests.push_back(std::move(request));
    }
  }
  for (TraceRequest& request : requests) request.arrival_s /= options.speed;
  return trace;
}

template <void (*read)(const std::string& path, Draft& draft), int block_tokens>
Result<Trace> load_trace(const std::string& path, const TraceOptions& options) {
  if (!(options.speed > 0 && options.rate > 0 && options.jitter_s >= 0 && options.repeat >= 1 && options.clients >= 1))
    return invalid(
        "invalid trace options: expected speed and rate above 0, jitter from 0, repetitions and clients from 1");
  try {
    Draft draft(block_tokens, options);
    read(path, draft);
    if (draft.trace.requests.empty()) return invalid(path + ": the trace has no requests");
    return arranged(std::move(draft));
  } catch (const Error& error) {
    return error;
  }
}

// Calls visit(fields, where) for every object of a file, until the draft is full.
template <class Visit>
void for_each_row(const std::string& path, Draft& draft, Result<bool> (RecordReader::*next)(std::string*),
                  Visit visit) {
  RecordReader reader(path);
  std::string text;
  while (!draft.full() && need((reader.*next)(&text))) {
    const std::string where = reader.where();
    const json row = need(parse_json(text, where, {.max_bytes = RecordReader::kMaxBytes}));
    JsonFields fields(row, where);
    visit(fields, where);
    draft.check_order(where);
  }
}

// The same for a CSV file. Its first line must be one of `headers`; a row becomes an object of its cells by name.
template <class Visit>
void for_each_cells(const std::string& path, Draft& draft, std::initializer_list<std::string_view> headers,
                    Visit visit) {
  auto split = [](std::string_view text) {
    std::vector<std::string> cells;
    for (size_t at; (at = text.find(',')) != text.npos; text.remove_prefix(at + 1)) cells.emplace_back(text, 0, at);
    cells.emplace_back(text);
    return cells;
  };
  RecordReader reader(path);
  std::string line;
  if (!need(reader.line(&line))) return;
  if (std::find(headers.begin(), headers.end(), line) == headers.end())
    fail(reader.where(), "expected the header " + std::string(*headers.begin()));
  const auto names = split(line);
  while (!draft.full() && need(reader.line(&line))) {
    const auto cells = split(line);
    const std::string where = reader.where();
    if (cells.size() != names.size()) fail(where, "expected " + std::to_string(names.size()) + " cells");
    json row;
    for (size_t i = 0; i < cells.size(); ++i) {
      row[names[i]] = json::parse(cells[i], nullptr, false);  // a cell that is no number is a text
      if (!row[names[i]].is_number()) row[names[i]] = cells[i];
    }
    JsonFields fields(row, where);
    visit(fields, where);
    draft.check_order(where);
  }
}

// Turns the file's ids, which `scope` distinguishes, into ids of the trace. A file may omit the id of a partial last
// block, which then belongs to this request alone.
void add_blocks(Draft& draft, JsonFields& fields, const std::string& where, bool tail_has_id, uint64_t scope = 0) {
  TraceRequest& request = draft.trace.requests.back();
  const json& ids = fields.array("hash_ids");
  const size_t whole = size_t(request.prompt_tokens / draft.trace.block_tokens);
  const size_t all = size_t((request.prompt_tokens - 1) / draft.trace.block_tokens + 1);
  if (ids.size() != all && (tail_has_id || ids.size() != whole))
    fail(where, "hash_ids: " + std::to_string(ids.size()) + " ids, but a prompt of " +
                    std::to_string(request.prompt_tokens) + " tokens needs " + std::to_string(all) + ", one per " +
                    std::to_string(draft.trace.block_tokens) + " tokens");
  request.blocks.reserve(all);
  uint64_t before = scope;
  for (const json& id : ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<int64_t>() < 0))
      fail(where, "hash_ids: expected whole numbers from 0");
    before = chain_hash(before, id.get<uint64_t>());
    request.blocks.push_back(before);
  }
  draft.fill_with_own_blocks(before);
}

// Reads a row of lengths and hashes. Other fields are errors, except those that the caller has read.
void add_hashed(Draft& draft, JsonFields& fields, const std::string& where, double per_second, bool tail_has_id) {
  const double at = fields.number("timestamp", 0, kMaxSeconds);
  const int64_t input = fields.integer("input_length", 1, kMaxTokens);
  const int64_t output = fields.integer("output_length", 1, kMaxTokens);
  draft.add(at / per_second, input, output);
  add_blocks(draft, fields, where, tail_has_id);
  fields.no_others();
}

// {"timestamp": ms, "input_length", "output_length", "hash_ids"}: one id for each 512 tokens of the prompt, and one for
// a partial last block. A row may have a "session_id", a text or a number. The first row of a session arrives at its
// timestamp. A later row arrives "delay" ms after the answer of the one before; its timestamp is ignored. Its lengths
// and ids describe the whole prompt.
void read_mooncake(const std::string& path, Draft& draft) {
  if (draft.options.hash_block_tokens > 0) draft.trace.block_tokens = draft.options.hash_block_tokens;
  std::unordered_map<std::string, int> sessions;  // -> index of its last request
  for_each_row(path, draft, &RecordReader::line, [&](JsonFields& fields, const std::string& where) {
    const json* id = fields.find("session_id");
    if (id && !id->is_string() && !id->is_number_integer())
      fail(where, "session_id: expected a text or a whole number");
    const bool delayed = fields.find("delay");
    if (!id) {
      if (delayed) fail(where, "delay: only later rows of a session have one, and this row has no session_id");
      return add_hashed(draft, fields, where, 1000, true);
    }
    const auto [session, is_first] = sessions.try_emplace(id->dump(), -1);
    const double delay_s = fields.number_or("delay", 0, kMaxSeconds, 0) / 1000;
    if (is_first) {
      if (delay_s > 0) fail(where, "delay: not expected in a session's first row, which arrives at its timestamp");
      add_hashed(draft, fields, where, 1000, true);
      draft.follows(-1, 0);
    } else {
      if (!delayed)
        fail(where, "delay: expected in a session's later row: the time between the last answer and this request");
      draft.trace.closed_loop = true;
      draft.row_timed = false;
      fields.find("timestamp");
      const double before_s = draft.trace.requests[size_t(session->second)].arrival_s;
      const int64_t input = fields.integer("input_length", 1, kMaxTokens);
      const int64_t output = fields.integer("output_length", 1, kMaxTokens);
      draft.add(before_s + delay_s, input, output);
      add_blocks(draft, fields, where, true);
      fields.no_others();
      draft.follows(session->second, delay_s);
    }
    session->second = draft.last();
  });
}

// The same with times in seconds, and with the chat that each request continues. The file does not say how long an
// answer took, so think_s is the time between two arrivals.
void read_bailian(const std::string& path, Draft& draft) {
  std::unordered_map<int64_t, int> chats;  // -> index of its request
  int orphans = 0;
  auto visit = [&](JsonFields& fields, const std::string& where) {
    const int64_t chat = fields.integer("chat_id", 0, INT64_MAX);
    const int64_t parent = fields.integer("parent_chat_id", -1, INT64_MAX);
    fields.string("type");
    fields.integer("turn", 0, kMaxTokens);
    add_hashed(draft, fields, where, 1, false);
    const auto known = chats.find(parent);
    const int before = known == chats.end() ? -1 : known->second;
    orphans += parent >= 0 && before < 0;
    const auto at_s = [&](int i) { return draft.trace.requests[size_t(i)].arrival_s; };
    draft.follows(before, before < 0 ? 0 : at_s(draft.last()) - at_s(before));
    chats[chat] = draft.last();
  };
  for_each_row(path, draft, &RecordReader::line, visit);
  draft.note(orphans, " chats continue one that is not in the file; they are treated as new");
}

// One agent of a session: its requests in order, and its sub-agents, which run in parallel while it waits. A
// sub-agent's `t` is the time at which it ended, and duration_ms is how long it ran. Times inside it count from its
// start.
struct WekaAgent {
  Draft& draft;
  uint64_t scope;
  int empty_answers = 0;
  // The first request comes think_s after request `after`. Returns the index of the last request, or -1 if there is
  // none.
  int add(const json& agent, const std::string& what, double start_s, int after, double think_s, bool is_sub) {
    JsonFields whole(agent, what);
    const int session = draft.n_sessions++;
    int last = -1, ended_last = -1;  // our last request; and the last one of the sub-agents since then that ended last
    double last_s = start_s, last_end_s = start_s, sub_end_s = 0;
    for (int i = 0; const json& row : whole.array("requests")) {
      const std::string where = what + (is_sub ? "." : ": ") + "requests[" + std::to_string(i++) + "]";
      JsonFields fields(row, where);
      const double at_s = start_s + fields.number("t", 0, kMaxSeconds);
      const std::string type = fields.string("type");
      if (type == "subagent") {
        const double ran_s = fields.number("duration_ms", 0, kMaxSeconds) / 1000;
        const double from_s = std::max(at_s - ran_s, last_s);
        const int sub = add(row, where, from_s, last < 0 ? after : last, last < 0 ? think_s : from_s - last_end_s,
                            true);
        if (sub < 0) continue;
        const double end_s = std::max(at_s, draft.trace.requests[size_t(sub)].arrival_s);
        if (end_s >= sub_end_s) ended_last = sub, sub_end_s = end_s;
        continue;
      }
      if (type != "s" && type != "n") fail(where, "type: \"" + type + "\"; expected s, n or subagent");
      const int64_t in = fields.integer("in", 1, kMaxTokens), out = fields.integer("out", 0, kMaxTokens);
      const double api_s = fields.number_or("api_time", 0, kMaxSeconds, 0);
      const double thought_s = fields.number_or("think_time", 0, kMaxSeconds, at_s - last_end_s);
      if (at_s < last_s) fail(where, "t: earlier than the request before; expected requests sorted by time");
      const bool joins = ended_last >= 0 && sub_end_s <= at_s;  // else the sub-agents run on beside it
      TraceRequest& request = draft.add(at_s, in, std::max<int64_t>(out, 1));
      request.session = session;
      request.after = joins ? ended_last : last < 0 ? after : last;
      if (request.after >= 0)
        request.think_s = std::max(0.0, joins ? at_s - sub_end_s : last < 0 ? think_s : thought_s);
      empty_answers += out == 0;
      add_blocks(draft, fields, where, false, scope);
      last = draft.last(), last_s = at_s, last_end_s = at_s + api_s, ended_last = -1, sub_end_s = 0;
    }
    return ended_last >= 0 ? ended_last : last;
  }
};

// A file is one session. A folder is all its *.json files, sorted by name.
void read_weka(const std::string& path, Draft& draft) {
  std::vector<std::string> files;
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) {
    for (const auto& entry : std::filesystem::directory_iterator(path, none))
      if (entry.path().extension() == ".json") files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  draft.timed = false;
  draft.trace.closed_loop = true;
  int empty_answers = 0;
  for (uint64_t number = 1; const std::string& file : files) {
    const json session = need(parse_json_file(file, {.max_bytes = 256u << 20}));
    JsonFields fields(session, file);
    fields.integer("block_size", draft.trace.block_tokens, draft.trace.block_tokens);
    const bool local = fields.string_or("hash_id_scope", "local") == "local";
    WekaAgent agent{draft, local ? mix64(number) : 0};
    agent.add(session, file, 0, -1, 0, false);
    empty_answers += agent.empty_answers;
    ++number;
  }
  draft.note(empty_answers, " answers of 0 tokens are treated as answers of 1 token");
}

// "2023-11-16 18:17:03.9799600", with or without "+00:00", in seconds. Its origin is late enough that a double keeps
// 100 ns.
double date_time(const std::string& text, const std::string& where) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, end = 0;
  double second = -1;
  std::sscanf(text.c_str(), "%4d-%2d-%2d %2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second, &end);
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(unsigned(month)),
                                         std::chrono::day(unsigned(day))};
  const std::string_view rest = std::string_view(text).substr(size_t(end));
  if (!date.ok() || hour < 0 || hour > 23 || minute < 0 || minute > 59 || !(second >= 0 && second < 61) ||
      (rest != "" && rest != "+00:00"))
    fail(where, "TIMESTAMP: \"" + text + "\"; expected YYYY-MM-DD hh:mm:ss.fffffff");
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count() - 19000;
  return double(((days * 24 + hour) * 60 + minute) * 60) + second;
}

void read_azure(const std::string& path, Draft& draft) {
  auto visit = [&](JsonFields& fields, const std::string& where) {
    const std::string time = fields.string("TIMESTAMP");
    const int64_t input = fields.integer("ContextTokens", 1, kMaxTokens);
    const int64_t output = fields.integer("GeneratedTokens", 1, kMaxTokens);
    draft.add(date_time(time, where), input, output);
    draft.fill_with_own_blocks();
  };
  for_each_cells(path, draft, {"TIMESTAMP,ContextTokens,GeneratedTokens"}, visit);
}

// Version 2 also has sessions and the duration of each call.
void read_burstgpt(const std::string& path, Draft& draft) {
  std::unordered_map<std::string, std::pair<int, double>> sessions;  // -> index and end of its last request
  int failures = 0;
  auto visit = [&](JsonFields& fields, const std::string&) {
    const double at_s = fields.number("Timestamp", 0, kMaxSeconds);
    const double took_s = fields.number_or("Elapsed time", 0, kMaxSeconds, 0);
    const std::string session = fields.string_or("Session ID", "");
    const int64_t input = fields.integer("Request tokens", 0, kMaxTokens);
    const int64_t output = fields.integer("Response tokens", 0, kMaxTokens);
    if (input == 0 || output == 0) return void(++failures);
    draft.add(at_s, input, output);
    draft.fill_with_own_blocks();
    if (session.empty()) return;
    auto& [last, end_s] = sessions.try_emplace(session, -1, 0).first->second;
    draft.follows(last, at_s - end_s);
    last = draft.last(), end_s = at_s + took_s;
  };
  for_each_cells(path, draft,
                 {"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
                  "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"},
                 visit);
  draft.note(failures, " rows without prompt or response tokens (failures) are dropped");
}

struct SpokenMessage {
  bool is_answer;
  std::string text;
};
// The prompt of an answer is everything said before it.
void add_conversation(Draft& draft, const std::vector<SpokenMessage>& messages) {
  const size_t piece_bytes = size_t(draft.trace.block_tokens) * 4;
  auto tokens = [](const std::string& text) { return int64_t((text.size() + 3) / 4); };
  draft.timed = false;
  std::string said;
  int last = -1;
  for (const auto& [is_answer, text] : messages) {
    if (is_answer && !said.empty() && !text.empty() && !draft.full()) {
      TraceRequest& request = draft.add(0, tokens(said), tokens(text));
      uint64_t before = 0;
      for (size_t at = 0; at < said.size(); at += piece_bytes)
        request.blocks.push_back(before = chain_hash(before, siphash({}, said.substr(at, piece_bytes))));
      draft.follows(last, draft.options.think_s);
      draft.trace.closed_loop |= last >= 0;
      last = draft.last();
    }
    said += text + "\n";
  }
}

// {"conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}, ...]}. Other fields are ignored.
void read_turns(const std::string& path, Draft& draft, Result<bool> (RecordReader::*next)(std::string*),
                const char* list, const char* role, const char* content) {
  for_each_row(path, draft, next, [&](JsonFields& fields, const std::string& where) {
    std::vector<SpokenMessage> messages;
    for (int i = 0; const json& turn : fields.array(list)) {
      const std::string at = where + ": " + list + "[" + std::to_string(i++) + "]";
      const std::string who = need(get_string(turn, role, at));
      const bool is_answer = who == "gpt" || who == "assistant" || who == "chatgpt" || who == "bing" || who == "bard";
      messages.push_back({is_answer, need(get_string(turn, content, at))});
    }
    add_conversation(draft, messages);
  });
}
void read_sharegpt(const std::string& path, Draft& draft) {
  read_turns(path, draft, &RecordReader::object, "conversations", "from", "value");
}
void read_lmsys(const std::string& path, Draft& draft) {
  read_turns(path, draft, &RecordReader::line, "conversation", "role", "content");
}
void read_dolly(const std::string& path, Draft& draft) {
  for_each_row(path, draft, &RecordReader::line, [&](JsonFields& fields, const std::string&) {
    const std::string instruction = fields.string("instruction"), context = fields.string_or("context", "");
    const std::string response = fields.string("response");
    add_conversation(draft, {{false, context.empty() ? instruction : instruction + "\n" + context}, {true, response}});
  });
}

template <Trace (*generate)(const TraceOptions&)>
void read_generated(const std::string&, Draft& draft) {
  draft.trace = generate(draft.options);
}

}  // namespace

const std::vector<TraceFormat>& trace_formats() {
  static const std::vector<TraceFormat> formats = {
      {"mooncake", load_trace<read_mooncake, 512>, 512, "Mooncake, FAST'25: conversation, tool&agent, synthetic"},
      {"weka", load_trace<read_weka, 64>, 64,
       "WEKA, kv-cache-tester: coding agents with sub-agents; a file or a folder"},
      {"bailian", load_trace<read_bailian, 16>, 16, "Qwen-Bailian, ATC'25: chats and API calls"},
      {"azure", load_trace<read_azure, 64>, 64, "Azure LLM inference, 2023 and 2024: lengths and times"},
      {"burstgpt", load_trace<read_burstgpt, 64>, 64, "BurstGPT, KDD'25, versions 1 and 2: lengths and times"},
      {"sharegpt", load_trace<read_sharegpt, 16>, 16, "ShareGPT: conversations"},
      {"dolly", load_trace<read_dolly, 16>, 16, "databricks-dolly-15k: instructions"},
      {"lmsys", load_trace<read_lmsys, 16>, 16, "LMSYS-Chat-1M as JSON lines: conversations"},
      {"tool_agent", load_trace<read_generated<generate_tool_agent>, 512>, 512,
       "generated: Mooncake's tool&agent, FAST'25"},
      {"servegen", load_trace<read_generated<generate_client_pool>, 64>, 64,
       "generated: a pool of clients, ServeGen, NSDI'26"},
  };
  return formats;
}

}  // namespace xpyd::disagg
