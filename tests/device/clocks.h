// Vector clocks of streams: is every access to memory ordered after those that it must come after?
//
//     stream a   write --- event                        a stream's clock: how far it knows every stream to have come
//     stream b             wait --- read   ok           event: the clock of its stream at that moment
//     stream c   read                      refused      wait: the stream learns the event's clock
//
// What the host does orders nothing here, nor does time: only waits do.  Memory that is freed may be used again by the next that is
// made on the same stream, so that stream must come after every use on others by then, or be told of them (record_stream).

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace clocks {

using Clock = std::vector<uint64_t>;
using Name = std::pair<int, int64_t>;  // device, stream

struct Access {
  size_t stream;
  uint64_t tick;
  std::string what;
};

struct Block {
  size_t maker = 0;
  std::vector<Access> reads;
  std::vector<Access> writes;  // at most one
  std::set<size_t> kept;
};

class Clocks {
 public:
  // Called in the middle of an operation, so a fault is noted only.
  void allocate(const void* memory, Name name) {
    std::lock_guard lock(mutex_);
    const size_t stream = number(name);
    for (const Access& access : freed_[stream]) {
      if (on_ && !knows(stream, access)) {
        faults_.push_back("memory of stream " + text(stream) + " was freed and may be used again while " + text(access.stream) +
                          " may still use it in " + access.what + ", and record_stream was not called");
      }
    }
    freed_[stream].clear();
    blocks_[memory] = Block{stream, {}, {}, {}};
  }

  void free(const void* memory) noexcept {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(memory);
    if (found == blocks_.end()) return;
    const Block& block = found->second;
    for (const auto* accesses : {&block.reads, &block.writes}) {
      for (const Access& access : *accesses) {
        if (access.stream != block.maker && !block.kept.count(access.stream)) freed_[block.maker].push_back(access);
      }
    }
    blocks_.erase(found);
  }

  void keep(const void* memory, Name stream) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(memory);
    if (found != blocks_.end()) found->second.kept.insert(number(stream));
  }

  void access(const void* memory, Name name, bool writes, const std::string& what) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(memory);
    if (found == blocks_.end()) return;
    const size_t stream = number(name);
    Block& block = found->second;
    require(stream, block.writes, writes ? "writes" : "reads", what);
    if (writes) require(stream, block.reads, "writes", what);
    const Access now{stream, ++clock(stream)[stream], what};
    if (writes) {
      block.writes = {now};
      block.reads.clear();
    } else {
      auto& reads = block.reads;
      reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Access& a) { return a.stream == stream; }), reads.end());
      reads.push_back(now);
    }
  }

  Clock record(Name stream) {
    std::lock_guard lock(mutex_);
    return clock(number(stream));
  }

  void wait(Name stream, const Clock& event) {
    std::lock_guard lock(mutex_);
    join(clock(number(stream)), event);
  }

  // A copy between devices: torch lets either stream wait for the other, before and after it.
  void meet(Name one, Name other) {
    std::lock_guard lock(mutex_);
    Clock& first = clock(number(one));
    join(first, clock(number(other)));
    join(clock(number(other)), clock(number(one)));
  }

  void check(bool on) {
    std::lock_guard lock(mutex_);
    on_ = on;
    faults_.clear();
  }

  std::vector<std::string> faults() {
    std::lock_guard lock(mutex_);
    return faults_;
  }

 private:
  size_t number(Name name) {
    auto [found, added] = numbers_.emplace(name, names_.size());
    if (added) names_.push_back(name);
    return found->second;
  }

  Clock& clock(size_t stream) {
    if (clocks_.size() < names_.size()) clocks_.resize(names_.size());
    Clock& found = clocks_[stream];
    if (found.size() < names_.size()) found.resize(names_.size());
    return found;
  }

  static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
  }

  bool knows(size_t stream, const Access& access) { return access.stream == stream || clock(stream)[access.stream] >= access.tick; }

  void require(size_t stream, const std::vector<Access>& earlier, const char* does, const std::string& what) {
    for (const Access& access : earlier) {
      if (!on_ || knows(stream, access)) continue;
      std::ostringstream message;
      message << what << " on stream " << text(stream) << " " << does << " what " << access.what << " used on stream "
              << text(access.stream) << ", without a wait";
      faults_.push_back(message.str());
      TORCH_CHECK(false, message.str());
    }
  }

  std::string text(size_t stream) const {
    return "twin:" + std::to_string(names_[stream].first) + "/" + std::to_string(names_[stream].second);
  }

  std::mutex mutex_;
  bool on_ = false;
  std::map<Name, size_t> numbers_;
  std::vector<Name> names_;
  std::vector<Clock> clocks_;
  std::map<const void*, Block> blocks_;
  std::map<size_t, std::vector<Access>> freed_;  // by the stream that the memory was made on: its last uses on others
  std::vector<std::string> faults_;
};

}  // namespace clocks
