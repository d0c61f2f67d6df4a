// Slices of a batch, dealt to the workers of threads; what a slice gives depends on no worker.
#pragma once
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

template <class Worker, class Work>
void run_slices(long slices, std::vector<Worker>& workers, Work&& work) {
  std::atomic<long> next{0};
  auto all = [&](Worker& k) {
    for (long i; (i = next++) < slices;) work(i, k);
  };
  std::vector<std::thread> others;
  others.reserve(workers.size());
  try {
    for (size_t i = 1; i < workers.size(); ++i) others.emplace_back(all, std::ref(workers[i]));
  } catch (const std::exception&) {  // no thread to be had: this one takes all slices
  }
  all(workers[0]);
  for (std::thread& other : others) other.join();
}
