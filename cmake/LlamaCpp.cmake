# Where llama.cpp's headers are, and its built tools. Sets
#   TERN_GGML_INCLUDE_DIRS   the folders of ggml.h, ggml-backend-impl.h and ggml-impl.h
#   TERN_LLAMA_CPP_DIST      the folder of the stock tools and libraries to ship; empty with TERN_LLAMA_CPP_DIR
#   TERN_LLAMA_CPP_CPU       a file with the instruction sets that these were compiled for, as the compiler names them
#
# The pinned source comes from tools/build_llama_cpp.py, which fetches and builds it once per machine, apart from this build.
# The variable TERN_LLAMA_CPP_DIR (CMake's or the environment's) names another llama.cpp source tree: then the plug-in is
# compiled against its headers, and no tools are built or shipped.

if(NOT TERN_LLAMA_CPP_DIR AND DEFINED ENV{TERN_LLAMA_CPP_DIR})
  set(TERN_LLAMA_CPP_DIR "$ENV{TERN_LLAMA_CPP_DIR}")
endif()

if(TERN_LLAMA_CPP_DIR)
  get_filename_component(_source "${TERN_LLAMA_CPP_DIR}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
  set(TERN_LLAMA_CPP_DIST "")
  message(STATUS "llama.cpp: headers from ${_source} (TERN_LLAMA_CPP_DIR); no tools are shipped")
else()
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(_command "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/tools/build_llama_cpp.py" build --json --cmake
               "${CMAKE_COMMAND}"
  )
  if(CMAKE_GENERATOR STREQUAL "Ninja")
    list(APPEND _command --ninja "${CMAKE_MAKE_PROGRAM}")
  endif()
  execute_process(COMMAND ${_command} OUTPUT_VARIABLE _answer RESULT_VARIABLE _result)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "llama.cpp could not be built (see above). To leave it out, name a llama.cpp source tree in "
                        "TERN_LLAMA_CPP_DIR."
    )
  endif()
  string(JSON _source GET "${_answer}" source)
  string(JSON TERN_LLAMA_CPP_DIST GET "${_answer}" dist)
  string(JSON _cpu GET "${_answer}" cpu)
  set(TERN_LLAMA_CPP_CPU "${CMAKE_CURRENT_BINARY_DIR}/CPU")
  file(CONFIGURE OUTPUT "${TERN_LLAMA_CPP_CPU}" CONTENT "${_cpu}\n")
endif()

foreach(_header ggml/include/ggml-backend.h ggml/src/ggml-backend-impl.h ggml/src/ggml-impl.h)
  if(NOT EXISTS "${_source}/${_header}")
    message(FATAL_ERROR "${_source} is no llama.cpp source tree: ${_header} is missing. Set TERN_LLAMA_CPP_DIR to the "
                        "top folder of one, or unset it to use the pinned version."
    )
  endif()
endforeach()
set(TERN_GGML_INCLUDE_DIRS "${_source}/ggml/include" "${_source}/ggml/src")

# llama-cpp-python's LLAMA_CPP_LIB_PATH wants the plain names libllama.so and libmtmd.so. A copy under that name would be
# a second library to the dynamic loader; these are empty libraries that need the real one, so that every symbol looked
# up through them is found there and it is loaded once.
function(tern_add_plain_name name)
  set(_empty "${CMAKE_CURRENT_BINARY_DIR}/empty_${name}.cpp")
  file(CONFIGURE OUTPUT "${_empty}" CONTENT "// lib${name}.so only needs lib${name}.so.0\n")
  add_library(${name}_by_plain_name MODULE "${_empty}")
  target_link_options(${name}_by_plain_name PRIVATE "LINKER:--no-as-needed")
  target_link_libraries(${name}_by_plain_name PRIVATE "${TERN_LLAMA_CPP_DIST}/lib${name}.so.0")
  set_target_properties(
    ${name}_by_plain_name PROPERTIES OUTPUT_NAME ${name} BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN"
  )
endfunction()

if(TERN_LLAMA_CPP_DIST)
  tern_add_plain_name(llama)
  tern_add_plain_name(mtmd)
endif()
