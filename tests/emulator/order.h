// The order of work on streams, as vector clocks.
//
// Each operator is a tick of its stream. A stream's clock has, for each stream, the last tick that is sure to have
// passed before the stream's next work: it learns from events that it waits for, and from what the host has waited for
// before it launches. Nothing else is taken to have passed, as on a device that is as slow as it may be. Memory knows
// its last writer and its readers since; who reads or writes without having waited for them is an error.
#pragma once
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hidden.h"

namespace order {

using Clock = std::map<uint64_t, long>;  // stream -> tick

struct Access {
  uintptr_t begin, end;
  bool writes;
  long block = 0;  // of the allocator, in a capture; 0: the graph's own memory
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage = {};  // with it
};

struct Use {  // an operator on a stream
  std::string name;
  uint64_t stream;
  long tick;
};

struct Piece {
  uintptr_t end;
  Use writer{"", 0, 0};
  std::map<uint64_t, Use> readers = {};
};

struct PinnedCopy {  // one that the host has not yet waited for
  Use use;
  char* at;
  std::string bytes;
  bool to_host;
  bool is_in_use = false;  // by work on a stream
};

std::recursive_mutex mutex;
Clock& host = *new Clock;
std::map<uint64_t, Clock>&streams = *new std::map<uint64_t, Clock>, &events = *new std::map<uint64_t, Clock>;
std::map<uintptr_t, Piece>& memory = *new std::map<uintptr_t, Piece>;
std::map<uint64_t, std::string>& names = *new std::map<uint64_t, std::string>;
std::vector<PinnedCopy>& copies = *new std::vector<PinnedCopy>;

using Guard = std::lock_guard<std::recursive_mutex>;

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}

bool has_passed(const Clock& clock, uint64_t stream, long tick) {
  const auto found = clock.find(stream);
  return found != clock.end() && found->second >= tick;
}

std::string named(uint64_t stream) {
  if (names.count(stream)) return names[stream];
  return stream ? "stream " + std::to_string(stream) : "the default stream";
}

Use next(const std::string& name, uint64_t stream) {
  Guard guard(mutex);
  join(streams[stream], host);
  return {name, stream, ++streams[stream][stream]};
}

void check(const Use& use, const char* verb, const Use& other, const char* others_verb) {
  if (!other.tick || other.stream == use.stream || has_passed(streams[use.stream], other.stream, other.tick)) return;
  TORCH_CHECK(false, "emulator: ", use.name, " on ", named(use.stream), " ", verb, " what ", other.name, " on ",
              named(other.stream), " ", others_verb, ", without waiting for it");
}

void split(uintptr_t at) {
  auto after = memory.upper_bound(at);
  if (after == memory.begin()) return;
  auto found = std::prev(after);
  if (found->first >= at || found->second.end <= at) return;
  Piece second = found->second;
  found->second.end = at;
  memory.emplace(at, second);
}

void settle(const PinnedCopy& copy) {
  if (copy.to_host) return hidden::show(copy.at, copy.bytes);
  TORCH_CHECK(!std::memcmp(copy.at, copy.bytes.data(), copy.bytes.size()), "emulator: the host has written into the ",
              "pinned memory that ", copy.use.name, " on ", named(copy.use.stream), " reads, without waiting for it");
}

// Settles, and forgets, the copies for which `condition` holds.
template <typename Condition>
void settle_if(const Condition& condition) {
  for (size_t i = 0; i < copies.size();) {
    if (!condition(copies[i])) { i++; continue; }
    const PinnedCopy copy = std::move(copies[i]);
    copies.erase(copies.begin() + i);
    settle(copy);
  }
  for (const auto& copy : copies)  // others may be on the same pages
    if (copy.to_host && !copy.is_in_use) hidden::forbid(copy.at, copy.bytes.size());
}

void touch(const Use& use, const Access& access) {
  if (access.begin >= access.end) return;
  Guard guard(mutex);
  split(access.begin);
  split(access.end);
  const auto begin = memory.lower_bound(access.begin);
  for (auto piece = begin; piece != memory.end() && piece->first < access.end; piece++) {
    check(use, access.writes ? "overwrites" : "reads", piece->second.writer, "writes");
    if (!access.writes) continue;
    for (const auto& [_, reader] : piece->second.readers) check(use, "overwrites", reader, "reads");
  }
  if (access.writes) {
    memory.erase(begin, memory.lower_bound(access.end));
    memory.emplace(access.begin, Piece{access.end, use});
    return;
  }
  uintptr_t at = access.begin;
  for (auto piece = begin; at < access.end; piece++) {  // gaps: memory that no operator has written
    if (piece == memory.end() || piece->first > at) {
      const auto end = piece == memory.end() ? access.end : std::min(access.end, piece->first);
      piece = memory.emplace(at, Piece{end}).first;
    }
    piece->second.readers[use.stream] = use;
    at = piece->second.end;
  }
}

// -- copies between the device and pinned memory: until the host waits, it must not write to it, nor read what arrives

bool overlaps(const PinnedCopy& copy, const char* at, size_t size) {
  return copy.at < at + size && at < copy.at + copy.bytes.size();
}

void copies_from(const Use& use, char* at, size_t size) {
  Guard guard(mutex);
  copies.push_back({use, at, std::string(at, size), false});
}

void copies_to(const Use& use, char* at, size_t size) {
  Guard guard(mutex);
  copies.push_back({use, at, std::string(at, size), true});
  hidden::hide(at, size);
}

// Work on a stream sees what other work has brought; until `end_use`.
void begin_use(const char* at, size_t size, bool writes) {
  Guard guard(mutex);
  settle_if([&](const PinnedCopy& copy) { return (writes || !copy.to_host) && overlaps(copy, at, size); });
  for (auto& copy : copies)
    if (overlaps(copy, at, size)) copy.is_in_use = true, hidden::show(copy.at, copy.bytes);
}

void end_use(const char* at, size_t size) {
  Guard guard(mutex);
  for (auto& copy : copies)
    if (copy.is_in_use && overlaps(copy, at, size)) copy.is_in_use = false, hidden::hide(copy.at, copy.bytes.size());
}

// Whether the host may use pinned memory; says why not.
bool is_allowed(const char* at) {
  Guard guard(mutex);
  for (const auto& copy : copies) {
    if (!copy.to_host || !overlaps(copy, at, 1)) continue;
    fprintf(stderr, "emulator: the host uses the pinned memory that %s on %s writes, without waiting for it\n",
            copy.use.name.c_str(), named(copy.use.stream).c_str());
    return false;
  }
  return true;
}

// -- what the runtime tells

void host_waits(const Clock& clock) {
  Guard guard(mutex);
  join(host, clock);
  settle_if([](const PinnedCopy& copy) { return has_passed(host, copy.use.stream, copy.use.tick); });
}

void host_waits_for_stream(uint64_t stream) {
  Guard guard(mutex);
  host_waits(streams[stream]);
}

void host_waits_for_event(uint64_t event) {
  Guard guard(mutex);
  host_waits(events[event]);
}

void host_waits_for_device() {
  Guard guard(mutex);
  for (const auto& [stream, clock] : streams) host_waits(clock);
}

void record_event(uint64_t event, uint64_t stream) {
  Guard guard(mutex);
  join(streams[stream], host);
  events[event] = streams[stream];
}

void wait_for_event(uint64_t stream, uint64_t event) {
  Guard guard(mutex);
  join(streams[stream], events[event]);
}

bool is_known(const Clock& clock) {
  return std::all_of(
      clock.begin(), clock.end(), [](const auto& each) { return has_passed(host, each.first, each.second); });
}

int stream_has_passed(uint64_t stream) {
  Guard guard(mutex);
  return is_known(streams[stream]);
}

int event_has_passed(uint64_t event) {
  Guard guard(mutex);
  return is_known(events[event]);
}

void access(const char* call, const void* at, size_t size, int writes, uint64_t stream) {
  const auto begin = reinterpret_cast<uintptr_t>(at);
  touch(next(call, stream), {begin, begin + size, writes != 0});
}

void new_memory(const void* at, size_t size) {
  Guard guard(mutex);
  const auto begin = reinterpret_cast<uintptr_t>(at);
  split(begin);
  split(begin + size);
  memory.erase(memory.lower_bound(begin), memory.lower_bound(begin + size));
}

void unpinned(const void* at, size_t size) {
  Guard guard(mutex);
  settle_if([&](const PinnedCopy& copy) { return overlaps(copy, static_cast<const char*>(at), size); });
  new_memory(at, size);
}

}  // namespace order
