// Pinned memory that the host must not use yet: it holds NaN, and using one of its pages ends the process.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace order { bool is_allowed(const char* at); }

namespace hidden {

constexpr uintptr_t PAGE = 4096;
int (*pinned_range)(const void* at, uintptr_t* begin, uintptr_t* end) = nullptr;  // of the runtime

// Pages of which nothing but pinned memory is a part, and which hold some of these bytes.
void protect(const void* at, size_t size, int access) {
  uintptr_t begin = 0, end = 0, first = reinterpret_cast<uintptr_t>(at), last = first + size;
  if (!size || !pinned_range(at, &begin, &end)) return;
  first = std::max(first / PAGE, (begin + PAGE - 1) / PAGE) * PAGE;
  last = std::min((last + PAGE - 1) / PAGE, end / PAGE) * PAGE;
  if (first < last) mprotect(reinterpret_cast<void*>(first), last - first, access);
}

struct sigaction other_faults = {};

void on_fault(int number, siginfo_t* info, void*) {
  auto* at = static_cast<char*>(info->si_addr);
  uintptr_t begin, end;
  if (!pinned_range(at, &begin, &end)) {  // it happens again
    sigaction(number, &other_faults, nullptr);
    return;
  }
  if (!order::is_allowed(at)) std::abort();
  protect(at, 1, PROT_READ | PROT_WRITE);  // other bytes of that page are hidden
}

void forbid(char* at, size_t size) {
  static const bool is_installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO;
    return !sigaction(SIGSEGV, &action, &other_faults);
  }();
  if (is_installed) protect(at, size, PROT_NONE);
}

void hide(char* at, size_t size) {
  protect(at, size, PROT_READ | PROT_WRITE);
  std::memset(at, 0xff, size);
  forbid(at, size);
}

void show(char* at, const std::string& bytes) {
  protect(at, bytes.size(), PROT_READ | PROT_WRITE);
  std::memcpy(at, bytes.data(), bytes.size());
}

}  // namespace hidden
