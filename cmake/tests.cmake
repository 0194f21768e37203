# tests/ROOM/*_test.cpp -> one GoogleTest executable test_ROOM, run from the repository root.
set(PITH_TEST_ENVIRONMENT "OMP_NUM_THREADS=1;OMPI_ALLOW_RUN_AS_ROOT=1;\
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;MPIRUN=${PITH_DEPS}/bin/mpirun;PITH_BUILD_DIR=${PROJECT_BINARY_DIR};\
PITHTRAIN=${PROJECT_BINARY_DIR}/pithtrain")
foreach(room core operators models engine text apps)
  file(GLOB sources CONFIGURE_DEPENDS tests/${room}/*_test.cpp)
  if(NOT sources)
    continue()
  endif()
  set(libraries pith_engine pith_text)
  if(room STREQUAL "text")
    set(libraries pith_text)
  endif()
  pith_executable(test_${room} SOURCES ${sources} LINK ${libraries} pith::gtest)
  pith_use_pch(test_${room})
  target_compile_definitions(test_${room} PRIVATE PITH_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(test_${room} PRIVATE ${PITH_LIGHT})
  # Four files at a time: most of a small file's compile time is the precompiled header's templates.
  set_target_properties(test_${room} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
  add_test(NAME ${room} COMMAND test_${room} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${room} PROPERTIES TIMEOUT 900 ENVIRONMENT
    "${PITH_TEST_ENVIRONMENT};GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/results/${room}.xml")
endforeach()

# tests/integration/NAME.sh: a script that gets the program's path, the build folder and an own
# temporary folder (its working directory, removed when it passes).
file(GLOB scripts CONFIGURE_DEPENDS tests/integration/*.sh)
foreach(script ${scripts})
  cmake_path(GET script STEM name)
  add_test(NAME integration.${name} COMMAND
    ${PROJECT_SOURCE_DIR}/cmake/run_in_temp.sh ${script} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(integration.${name} PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77 ENVIRONMENT
    "${PITH_TEST_ENVIRONMENT}")
endforeach()

# What ./pith test --oracle compares with Hugging Face's tokenizers.
pith_executable(oracle_driver SOURCES tests/oracle/tokenizers/driver.cpp LINK pith_text)
pith_use_pch(oracle_driver)
set_target_properties(oracle_driver PROPERTIES EXCLUDE_FROM_ALL ON)

# tests/gpu/*.cpp -> test_gpu: needs a GPU, so it is built with CUDA and run by hand.
file(GLOB gpu_sources CONFIGURE_DEPENDS tests/gpu/*.cpp)
if(PITH_CUDA AND gpu_sources)
  pith_executable(test_gpu SOURCES ${gpu_sources} LINK pith_engine pith_text pith::gtest)
  pith_use_pch(test_gpu)
  target_compile_definitions(test_gpu PRIVATE PITH_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(test_gpu PRIVATE $<$<CONFIG:Release>:-O1>)
endif()

# tests/parallel/*.cpp -> test_parallel, run as 2, 4 and 8 processes by the mpirun of .deps.
file(GLOB sources CONFIGURE_DEPENDS tests/parallel/*.cpp)
if(sources)
  pith_executable(test_parallel SOURCES ${sources} LINK pith_engine pith::gtest)
  pith_use_pch(test_parallel)
  target_compile_options(test_parallel PRIVATE $<$<CONFIG:Release>:-O1>)
  foreach(processes 2 4 8)
    set(name parallel${processes})
    add_test(NAME ${name} COMMAND ${PITH_DEPS}/bin/mpirun -n ${processes} --oversubscribe
      --bind-to none --mca mpi_yield_when_idle 1 $<TARGET_FILE:test_parallel>
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES TIMEOUT 900 PROCESSORS 2 ENVIRONMENT
      "${PITH_TEST_ENVIRONMENT};PITH_COMM_TIMEOUT_S=300;\
GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/results/${name}.xml")
  endforeach()
endif()
