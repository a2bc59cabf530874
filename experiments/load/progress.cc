#include "experiments/load/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace xpyd {
namespace {

std::string minutes(double seconds) {
  int64_t s = int64_t(std::clamp(seconds, 0.0, 359999.0));
  char text[32];
  if (s >= 3600)
    std::snprintf(text, sizeof text, "%d:%02d:%02d", int(s / 3600), int(s / 60 % 60), int(s % 60));
  else
    std::snprintf(text, sizeof text, "%02d:%02d", int(s / 60), int(s % 60));
  return text;
}

// A terminal that goes away must not end the run.
void write_some(int fd, const std::string& text) {
  if (write(fd, text.data(), text.size()) < 0) return;
}

}  // namespace

std::string Progress::line(const std::string& label, int64_t done, int64_t total, double elapsed_s,
                           const std::string& note, int columns) {
  done = std::clamp<int64_t>(done, 0, std::max<int64_t>(total, 0));
  double share = total > 0 ? double(done) / double(total) : 1;
  std::string left = done > 0 ? minutes(elapsed_s / double(done) * double(total - done)) : "--:--";
  std::string head = label + " " + std::to_string(int(share * 100)) + "% ";
  std::string tail = " " + std::to_string(done) + "/" + std::to_string(total) + " [" + minutes(elapsed_s) + "<" + left +
                     "]" + (note.empty() ? "" : " " + note);
  int room = std::clamp(columns - int(head.size() + tail.size()) - 2, 0, 30);
  int filled = int(share * room);
  std::string text = head;
  if (room > 0) text += "|" + std::string(size_t(filled), '#') + std::string(size_t(room - filled), ' ') + "|";
  text += tail;
  return text.substr(0, size_t(std::max(columns, 0)));
}

Progress::Progress(std::string label, int64_t total, Clock& clock, bool enabled, int fd)
    : label_(std::move(label)),
      total_(total),
      clock_(clock),
      fd_(fd),
      active_(enabled && isatty(fd)),
      start_s_(clock.now()),
      last_s_(start_s_ - 1) {}

Progress::~Progress() { finish(); }

void Progress::update(int64_t done, const std::string& note) {
  if (!active_) return;
  double now = clock_.now();
  if (now - last_s_ < 0.1 && done < total_) return;
  last_s_ = now;
  winsize size{};
  int columns = ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  write_some(fd_, "\r\033[K" + line(label_, done, total_, now - start_s_, note, columns - 1));
  drawn_ = true;
}

void Progress::finish() {
  if (active_ && drawn_) write_some(fd_, "\r\033[K");
  active_ = false;
}

}  // namespace xpyd
