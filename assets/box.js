// A message that was taken leaves the box, one that was refused comes back, once; what was typed since
// stays.
({ id, taken, back }, typed) => {
  if (back) {
    if (window.carpoolBack === id) return typed;
    window.carpoolBack = id;
    return typed && typed !== back ? `${back}\n${typed}` : back;
  }
  return taken && typed.startsWith(taken) ? typed.slice(taken.length).replace(/^\n/, "") : typed;
}
