# Where everything that is not ours comes from: the wheels that `./pith setup` put into .deps/, the
# distribution's packages, and the CUDA toolkit where there is one. All headers are system headers.

# --- the linker ---
find_program(MOLD mold)
set(PITH_LINKER "")
if(MOLD)
  set(PITH_LINKER -fuse-ld=mold)
endif()

# --- the folder of wheels ---
set(PITH_DEPS ${PROJECT_SOURCE_DIR}/.deps CACHE PATH "virtual environment made by ./pith setup")
file(GLOB PITH_WHEELS ${PITH_DEPS}/lib/python3.*/site-packages)
if(NOT EXISTS "${PITH_WHEELS}/torch/lib/libtorch_cpu.so")
  message(FATAL_ERROR "LibTorch not found under ${PITH_DEPS}: run ./pith setup first")
endif()
set(TORCH_LIB ${PITH_WHEELS}/torch/lib)
set(CU13_LIB ${PITH_WHEELS}/nvidia/cu13/lib)

# --- CUDA: compiled in when nvcc is found, used when a GPU is found at run time ---
find_program(NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
option(PITH_WITH_CUDA "compile the CUDA kernels when nvcc is there" ON)
set(PITH_CUDA 0)
if(NVCC AND PITH_WITH_CUDA)
  set(PITH_CUDA 1)
  set(CMAKE_CUDA_COMPILER ${NVCC})
  set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # the wheel's libcudart is linked below, by its path
  enable_language(CUDA)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has it
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA_USE_RESPONSE_FILE_FOR_INCLUDES 0)  # so that ccache sees the include folders
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG -lineinfo")
  set(CMAKE_CUDA_FLAGS_DEBUG "-O1 -lineinfo")
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall;-Werror=all-warnings>")
  find_package(CUDAToolkit REQUIRED)
endif()
add_compile_definitions(PITH_CUDA=${PITH_CUDA})

# --- LibTorch: libtorch_cuda.so is never linked. core/device.cpp opens it when a GPU is there, so
#     one program serves both kinds of machine and the CPU set of wheels stays small. ---
add_library(pith_torch INTERFACE)
add_library(pith::torch ALIAS pith_torch)
target_include_directories(pith_torch SYSTEM INTERFACE ${PITH_WHEELS}/torch/include
  ${PITH_WHEELS}/torch/include/torch/csrc/api/include)
target_link_libraries(pith_torch INTERFACE ${TORCH_LIB}/libc10.so ${TORCH_LIB}/libtorch_cpu.so)
if(PITH_CUDA)
  target_include_directories(pith_torch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(pith_torch INTERFACE ${TORCH_LIB}/libc10_cuda.so
    ${CU13_LIB}/libcudart.so.13)
endif()

target_compile_definitions(pith_torch INTERFACE AT_PER_OPERATOR_HEADERS)  # a third less to parse

# --- the distribution's libraries, as archives where there are archives ---
function(pith_library alias)
  string(REPLACE "::" "_" target ${alias})
  add_library(${target} INTERFACE)
  add_library(${alias} ALIAS ${target})
  foreach(name ${ARGN})
    string(MAKE_C_IDENTIFIER "LIBRARY_${name}" variable)
    find_library(${variable} NAMES lib${name}.a ${name})
    if(NOT ${variable})
      message(FATAL_ERROR "library ${name} not found: run ./pith setup")
    endif()
    target_link_libraries(${target} INTERFACE ${${variable}})
  endforeach()
endfunction()
find_package(Threads REQUIRED)
pith_library(pith::common_libraries xxhash zstd)
target_link_libraries(pith_common_libraries INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
pith_library(pith::text_libraries pcre2-8 utf8proc simdjson zstd z)
pith_library(pith::gtest gtest_main gtest)
pith_library(pith::benchmark benchmark)

# --- where the program looks for shared objects: .deps seen from the program's own folder.
#     LD_LIBRARY_PATH comes first, so on another machine that decides. ---
set(PITH_RUNPATH "\$ORIGIN")
foreach(folder ${TORCH_LIB} ${CU13_LIB} ${PITH_WHEELS}/nvidia/cudnn/lib
    ${PITH_WHEELS}/nvidia/nccl/lib ${PITH_DEPS}/lib)
  file(RELATIVE_PATH relative ${PROJECT_BINARY_DIR} ${folder})
  string(APPEND PITH_RUNPATH ":\$ORIGIN/${relative}")
endforeach()
