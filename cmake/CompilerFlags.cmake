# Warnings and code generation for our own targets: link the interface target tern_flags.

add_library(tern_flags INTERFACE)
target_compile_options(
  tern_flags
  INTERFACE
  -Wall
  -Wextra
  $<$<CONFIG:Release>:-O3>
  # A result has the same bits whatever the batch size and the split of work; a compiler that fuses a multiply and an add
  # in one loop and not in its remainder would break that. Kernels that want an FMA write it.
  -ffp-contract=off
)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(TERN_X86_64 TRUE)
else()
  set(TERN_X86_64 FALSE)
endif()
