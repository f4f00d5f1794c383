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
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(TERN_AARCH64 TRUE)
else()
  set(TERN_AARCH64 FALSE)
endif()

include(CheckCXXCompilerFlag)

# Adds sources for an instruction set to tern_cpu, compiled with FLAGS (a list), unless this compiler is too old for the last
# of them. Then NAME is defined for those who choose among the instruction sets.
function(tern_instruction_set name flags)
  list(GET flags -1 _last)
  check_cxx_compiler_flag("${_last}" HAVE_${name})
  if(HAVE_${name})
    target_sources(tern_cpu PRIVATE ${ARGN})
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${flags}")
    target_compile_definitions(tern_cpu PRIVATE ${name})
  endif()
endfunction()
