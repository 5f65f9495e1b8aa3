# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Stands in for CMake's own module (CMAKE_MODULE_PATH comes first). Every
# project that would be downloaded is written to FETCH_LOG, one name a line,
# and answered with a folder of empty files: nothing touches the network.

macro(FetchContent_Declare)
endmacro()

macro(FetchContent_GetProperties)
endmacro()

macro(FetchContent_Populate NAME)
  file(APPEND "${FETCH_LOG}" "${NAME}\n")
  set(${NAME}_SOURCE_DIR "${CMAKE_BINARY_DIR}/stub-${NAME}")
  # The files that CMake wants to see: what the project's own script names.
  file(GLOB _scripts "${CMAKE_SOURCE_DIR}/cmake/external_projects/*.cmake")
  foreach(_script IN LISTS _scripts)
    file(READ "${_script}" _text)
    string(REGEX MATCHALL "{${NAME}_SOURCE_DIR}/[a-zA-Z0-9_./]+[.](cu|cpp|py)"
                 _files "${_text}")
    foreach(_file IN LISTS _files)
      string(REPLACE "{${NAME}_SOURCE_DIR}" "" _file "${_file}")
      get_filename_component(_dir "${_file}" DIRECTORY)
      file(MAKE_DIRECTORY "${${NAME}_SOURCE_DIR}${_dir}")
      file(TOUCH "${${NAME}_SOURCE_DIR}${_file}")
    endforeach()
  endforeach()
endmacro()

macro(FetchContent_MakeAvailable NAME)
  FetchContent_Populate(${NAME})
endmacro()
