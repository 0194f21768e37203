# Reads JSON and prints each number, string, true, false and null as a line PATH<tab>VALUE: "steps.0.name<tab>qwen3".
# Exits with 1, and says where, at what is no JSON. Distributions do not bring jq; awk is everywhere.
{ text = text $0 "\n" }
END {
  at = 1
  value("")
  space()
  if (at <= length(text)) fail("the end")
}
function fail(wanted) {
  printf "no JSON: %s is missing before: %.40s\n", wanted, substr(text, at) >"/dev/stderr"
  exit 1
}
function space() {
  match(substr(text, at), /^[ \t\r\n]*/)
  at += RLENGTH
}
# What the pattern matches here, or "".
function take(pattern,    token) {
  if (!match(substr(text, at), pattern)) return ""
  token = substr(text, at, RLENGTH)
  at += RLENGTH
  return token
}
function string(    token) {
  token = take("^\"([^\"\\\\]|\\\\.)*\"")
  if (token == "") fail("a string")
  token = substr(token, 2, length(token) - 2)
  gsub(/\\"/, "\"", token)
  gsub(/\\[\/]/, "/", token)
  return token
}
function below(path, key) { return path == "" ? key : path "." key }
function value(path,    c, key, n) {
  space()
  c = substr(text, at, 1)
  if (c == "{" || c == "[") {
    ++at
    space()
    if (take(c == "{" ? "^}" : "^]") != "") return
    n = 0
    do {
      space()
      if (c == "{") {
        key = string()
        space()
        if (take("^:") == "") fail("':'")
        value(below(path, key))
      } else {
        value(below(path, n++))
      }
      space()
    } while (take("^,") != "")
    if (take(c == "{" ? "^}" : "^]") == "") fail(c == "{" ? "',' or '}'" : "',' or ']'")
    return
  }
  if (c == "\"") {
    print path "\t" string()
    return
  }
  key = take("^(true|false|null|-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]+)?)")
  if (key == "") fail("a value")
  print path "\t" key
}
